// What the bindings say of arguments that cannot be: a ValueError with the numbers in it.
#pragma once

#include <stdexcept>
#include <string>

namespace arguments {

inline void require(bool condition, const std::string &message) {
  if (!condition) throw std::invalid_argument(message);
}

template <class Number>
std::string number(Number value) {
  return std::to_string(value);
}

}  // namespace arguments
