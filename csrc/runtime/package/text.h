// What a string is made of.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace exportkit {

// Whether it is UTF-8 as the Unicode standard has it: no overlong forms, no surrogates, nothing beyond U+10FFFF.
bool is_utf8(std::string_view text);

// Appends a code point as UTF-8 (a surrogate as the three bytes it would have, which is_utf8 refuses).
void append_utf8(std::string& text, char32_t code_point);

// Whether Python takes it for a name, as str.isidentifier does. `text` is UTF-8.
bool is_identifier(std::string_view text);

// Whether Python's grammar has this word for itself, such as `class`.
bool is_keyword(std::string_view word);

// The bytes of base64 with its padding and without line breaks; nothing where it is none, or spelled in another way
// than the one that it must be.
std::optional<std::string> decode_base64(std::string_view text);

// What comes before the first line feed.
std::string first_line(std::string_view text);

// For messages: in quotes, at most some 100 bytes of it, with nothing that a terminal would obey.
std::string shown(std::string_view text);

}  // namespace exportkit
