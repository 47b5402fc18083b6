#include "say.h"

#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <set>

namespace zinc {

void say(const char *format, ...) {
    char line[1024];
    va_list values;
    va_start(values, format);
    std::vsnprintf(line, sizeof line, format, values);
    va_end(values);
    std::fprintf(stderr, "ggml-zinc: %s\n", line);
}

static std::mutex mutex;
static std::set<std::string> said;

void say_once(const std::string &line) {
    std::lock_guard<std::mutex> lock(mutex);
    if (said.insert(line).second) say("%s", line.c_str());
}

bool said_once() {
    std::lock_guard<std::mutex> lock(mutex);
    return !said.empty();
}

}  // namespace zinc
