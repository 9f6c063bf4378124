// What a terminal shows as it is.
#pragma once

#include <string>
#include <string_view>

namespace exportkit::run {

// Text on one line, without anything that a terminal would obey: what is no printable character of UTF-8 is spelled
// out, such as \x1b. What a package says of itself may be anything.
std::string printable(std::string_view text);

}  // namespace exportkit::run
