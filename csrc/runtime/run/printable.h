// Makes text safe to print on a terminal.
#pragma once

#include <string>
#include <string_view>

namespace exportkit::run {

// Text on one line without terminal control codes: unprintable characters become escapes such as \x1b. Needed because a
// package's text is untrusted.
std::string printable(std::string_view text);

}  // namespace exportkit::run
