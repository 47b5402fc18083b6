/* The processor as a device: its kernels are native code in a library of its own, libzinc_cpu (native/cpu). */
#pragma once
#include <stdbool.h>

#include "functions.h"

/* The functions of Vulkan that the processor answers. The library is $ZINC_ATTN_CPU_LIBRARY, or the best one for this
   processor that lies beside this library, or that the system finds. False, and why: there is none, or it would give
   other bits. */
bool za_processor(PFN_vkGetInstanceProcAddr *get_proc);
