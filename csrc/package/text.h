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

// Whether a parameter, a named tuple or its field may have this name: an ASCII letter or _, then those and digits, and
// no word that Python's grammar has for itself, such as `class`.
bool is_name(std::string_view text);

// Whether Python's grammar has this word for itself.
bool is_keyword(std::string_view word);

// Whether format versions 1 and 2 take it for a name: an identifier of Unicode 14, as Python 3.11 has them. UTF-8.
bool is_unicode_identifier(std::string_view text);

// The bytes of base64 with its padding and without line breaks; nothing where it is none, or spelled in another way
// than the one that it must be.
std::optional<std::string> decode_base64(std::string_view text);

// Base64 with its padding and without line breaks.
std::string encode_base64(std::string_view bytes);

// What comes before the first line feed.
std::string first_line(std::string_view text);

// With nothing that a terminal would obey: what is no printable ASCII character is spelled out, as \xNN.
std::string printable(std::string_view text);

// For messages: in quotes, at most some 100 bytes of it, with nothing that a terminal would obey.
std::string shown(std::string_view text);

}  // namespace exportkit
