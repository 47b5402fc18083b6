#define _GNU_SOURCE /* dladdr */
#include "processor.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "zinc_contract.h"

/* The first word of `needs`, the instruction sets of a library, that this processor lacks. NULL: it lacks none. */
static const char *lacks(const char *needs) {
#if defined(__x86_64__)
#define X(name) if (strstr(needs, " " name) && !__builtin_cpu_supports(name)) return name;
    X("avx") X("avx2") X("bmi") X("bmi2") X("fma") X("f16c")
    X("avx512f") X("avx512bw") X("avx512dq") X("avx512vl") X("avx512vnni")
#undef X
#endif
    return NULL;
}

/* Open a library. NULL: it cannot be opened or is for another processor, and `why` says which. */
static void *open_library(const char *path, char *why, size_t size) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const char *needs = library ? dlsym(library, "zinc_cpu_needs") : NULL, *lacking = needs ? lacks(needs) : NULL;
    if (library && needs && !lacking) return library;
    if (library) snprintf(why, size, "%s: it is for a processor with %s", path, needs ? lacking : "other functions");
    else snprintf(why, size, "%s", dlerror());
    if (library) dlclose(library);
    return NULL;
}

bool za_processor(PFN_vkGetInstanceProcAddr *get_proc) {
    static const char *const levels[] = {"-v4", "-v3", ""};
    const char *chosen = getenv("ZINC_ATTN_CPU_LIBRARY");
    char path[4096], why[512] = "";
    Dl_info info = {0};
    void *library = chosen && *chosen ? open_library(chosen, why, sizeof why) : NULL;
    dladdr((const void *)levels, &info); /* data of this library */
    const char *end = info.dli_fname ? strrchr(info.dli_fname, '/') : NULL;
    const int folder = end ? (int)(end + 1 - info.dli_fname) : 0;
    for (int place = 0; place < 2 && !library && !(chosen && *chosen); ++place)
        for (int i = 0; i < 3 && !library; ++i) {
            snprintf(path, sizeof path, "%.*slibzinc_cpu%s.so", place ? 0 : folder, info.dli_fname, levels[i]);
            library = open_library(path, why, sizeof why);
        }
    if (!library)
        return za_fail_as(ZA_UNSUPPORTED, "cpu: %s; build native/ with a C++ compiler, or set ZINC_ATTN_CPU_LIBRARY to "
                          "its libzinc_cpu.so", why);
    const char *(*find_fault)(void);
    *(void **)&find_fault = dlsym(library, "zinc_cpu_fault"); /* as POSIX has it */
    *(void **)get_proc = dlsym(library, "zinc_cpu_get_proc");
    const char *sources = dlsym(library, "zinc_cpu_sources");
    if (!find_fault || !*get_proc || !sources || strcmp(sources, ZA_SOURCES) != 0)
        return za_fail_as(ZA_UNSUPPORTED, "cpu: got a libzinc_cpu of other sources than this library's, expected one "
                          "that was built with it");
    const char *fault = find_fault();
    return !fault || za_fail_as(ZA_UNSUPPORTED, "cpu: %s, so that results would have other bits; build native/ with "
                                "another compiler", fault);
}
