// The C library's device and objects, for C++.
#pragma once
#include <atomic>

#include "zinc_attn.h"
extern "C" {
#include "device.h"
#include "error.h"
#include "laid.h"
#include "levels.h"
#include "objects.h"
#include "zinc_graph.h"
}
