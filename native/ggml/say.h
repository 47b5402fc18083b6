// Lines on stderr: llama.cpp's own log is filtered before it says who runs what.
#ifndef ZINC_GGML_SAY_H
#define ZINC_GGML_SAY_H

#include <string>

namespace zinc {

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
void say(const char *format, ...);

void say_once(const std::string &line);  // in the process
bool said_once();                        // whether any line was said so

}  // namespace zinc
#endif
