/* The processor as a device: its kernels are native code in a library of its own, libzinc_cpu (native/cpu). */
#pragma once
#include <stdbool.h>

#include "functions.h"

/* Find the processor's functions of Vulkan. Their library is $ZINC_ATTN_CPU_LIBRARY, or else the best library for
   this processor in the folder of this library or on the system's path. False: there is no such library, or it would
   give other bits; za_error says which. */
bool za_processor(PFN_vkGetInstanceProcAddr *get_proc);
