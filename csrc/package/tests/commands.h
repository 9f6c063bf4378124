// A program that answers each command with a line of JSON. Commands are arguments, or lines of standard input with tabs
// between their words.
#pragma once

#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "package/errors.h"
#include "package/text.h"

using exportkit::json_text;
using Words = std::vector<std::string>;
using Commands = std::map<std::string, std::string (*)(const Words&)>;

inline std::string answer(const std::string& value) { return "{\"ok\": true, \"value\": " + value + "}"; }

inline std::string run(const Commands& commands, const Words& words) {
  try {
    return commands.at(words.at(0))(words);
  } catch (const exportkit::Error& error) {
    return "{\"error\": \"" + std::string(error.name()) + "\", \"exit_code\": " + std::to_string(error.exit_code()) +
           ", \"message\": " + json_text(error.message()) + ", \"hint\": " + json_text(error.hint()) + "}";
  } catch (const std::exception& error) {
    return "{\"error\": null, \"message\": " + json_text(error.what()) + "}";
  }
}

inline int run_all(const Commands& commands, int argc, char** argv) {
  if (argc > 1) {
    std::cout << run(commands, Words(argv + 1, argv + argc)) << std::endl;
    return 0;
  }
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream text(line);
    Words words;
    for (std::string word; std::getline(text, word, '\t');) words.push_back(word);
    std::cout << run(commands, words) << std::endl;
  }
  return 0;
}
