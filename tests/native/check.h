// A test framework in one header: TEST registers, CHECK* record failures and let the test go on.
#pragma once

#include <cmath>
#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"

namespace hpcomm::check {

struct Test {
  std::string name;
  std::string file;
  std::function<void()> body;
};

// All tests of the executable, in the order of their files' initialisation.
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

// Prints "file:line: message" and counts the running test as failed. Callable from any thread. Defined in
// main.cpp.
void fail(const char* file, int line, const std::string& message);

// The name of the test that runs, or "". Callable in a signal handler. Defined in main.cpp.
[[nodiscard]] const char* running_test() noexcept;

// Whether UBSan looks on, or any sanitizer. Defined in sanitizers.cpp.
[[nodiscard]] bool under_ubsan() noexcept;
[[nodiscard]] bool under_sanitizer() noexcept;

struct Registration {
  Registration(const char* name, const char* file, std::function<void()> body) {
    tests().push_back({name, file, std::move(body)});
  }
};

// What a value looks like in a failure: itself where it can be printed, else its number or its size.
template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_same_v<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::is_same_v<T, char> || std::is_same_v<T, signed char> || std::is_same_v<T, unsigned char>) {
    out << static_cast<int>(value);
  } else if constexpr (std::is_convertible_v<T, std::string_view>) {
    out << '"' << std::string_view(value) << '"';
  } else if constexpr (requires { out << value; }) {
    out << value;
  } else if constexpr (requires { out << to_string(value); }) {
    out << to_string(value);
  } else if constexpr (std::is_enum_v<T>) {
    out << "enum " << static_cast<long long>(value);
  } else if constexpr (requires { value.begin() != value.end(); }) {
    out << '{';
    const char* separator = "";
    for (const auto& element : value) {
      out << separator << show(static_cast<const std::decay_t<decltype(element)>&>(element));
      separator = ", ";
    }
    out << '}';
  } else if constexpr (requires { value.has_value(); }) {
    out << (value.has_value() ? show(*value) : "nothing");
  } else {
    out << "<" << sizeof(T) << " bytes>";
  }
  return out.str();
}

// Integers compare by value whatever their signs, texts by their characters, everything else by its own ==.
template <typename T>
inline constexpr bool is_number = std::is_integral_v<T> && !std::is_same_v<T, bool> && !std::is_same_v<T, char>;

template <typename A, typename B>
bool equal(const A& a, const B& b) {
  if constexpr (is_number<A> && is_number<B>) {
    return std::cmp_equal(a, b);
  } else if constexpr (std::is_convertible_v<A, std::string_view> && std::is_convertible_v<B, std::string_view>) {
    return std::string_view(a) == std::string_view(b);
  } else {
    return a == b;
  }
}

template <typename A, typename B>
void check_eq(const char* file, int line, const char* text, const A& a, const B& b) {
  if (!equal(a, b)) {
    fail(file, line, str("CHECK_EQ(", text, "): ", show(a), " != ", show(b)));
  }
}

inline void check_near(const char* file, int line, const char* text, double a, double b, double tolerance) {
  // Written so that a NaN fails.
  if (!(std::fabs(a - b) <= tolerance)) {
    fail(file, line, str("CHECK_NEAR(", text, "): ", a, " and ", b, " differ by more than ", tolerance));
  }
}

template <typename Call>
void check_throws(const char* file, int line, const char* text, ErrorKind kind, std::string_view part, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    if (error.kind() != kind) {
      fail(file, line, str(text, " threw ", to_string(error.kind()), ", not ", to_string(kind), ": ", error.what()));
    } else if (std::string_view(error.what()).find(part) == std::string_view::npos) {
      fail(file, line, str(text, ": no \"", part, "\" in the message: ", error.what()));
    }
    return;
  } catch (const std::exception& error) {
    fail(file, line, str(text, " threw something else than hpcomm::Error: ", error.what()));
    return;
  }
  fail(file, line, str(text, " did not throw ", to_string(kind)));
}

}  // namespace hpcomm::check

namespace hpcomm::testing {

// Whether `part` is somewhere in `text`.
inline bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

}  // namespace hpcomm::testing

// The body runs in the global namespace; tests say `using namespace hpcomm;` once per file.
#define TEST(name)                                                                              \
  static void test_##name();                                                                    \
  static const ::hpcomm::check::Registration registration_##name{#name, __FILE__, test_##name}; \
  static void test_##name()

#define CHECK(...)                                                          \
  do {                                                                      \
    if (!(__VA_ARGS__)) {                                                   \
      ::hpcomm::check::fail(__FILE__, __LINE__, "CHECK(" #__VA_ARGS__ ")"); \
    }                                                                       \
  } while (false)

#define CHECK_EQ(a, b) ::hpcomm::check::check_eq(__FILE__, __LINE__, #a ", " #b, a, b)

#define CHECK_NEAR(a, b, tolerance) ::hpcomm::check::check_near(__FILE__, __LINE__, #a ", " #b, a, b, tolerance)

// CHECK_THROWS(ErrorKind::kProtocol, decode(bytes), "magic"): the kind and a part of the message.
#define CHECK_THROWS(kind, expression, part) \
  ::hpcomm::check::check_throws(__FILE__, __LINE__, #expression, kind, part, [&] { (void)(expression); })
