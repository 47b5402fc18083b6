// Lines on stderr. llama.cpp's own log drops the lines that say which device runs an operation.
#pragma once
#include <string>

namespace zinc {

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
void say(const char *format, ...);

void say_once(const std::string &line);  // once in the process
bool said_once();                        // whether say_once has said any line

}  // namespace zinc
