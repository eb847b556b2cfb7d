#include "gnnserve/json_lists.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"

using gnnserve::cut_lists;
using gnnserve::CutDocument;
using gnnserve::JsonListError;
using gnnserve::NumberKind;
using gnnserve::read_list;
using gnnserve::write_list;

namespace {

using Shape = std::vector<std::int64_t>;

template <typename T>
std::vector<T> read(const std::string& text, NumberKind kind, const Shape& shape) {
    std::size_t count = 1;
    for (const std::int64_t size : shape) {
        count *= static_cast<std::size_t>(size);
    }
    // Exactly as large as it must be, so that a sanitizer sees every write beyond it.
    std::vector<std::byte> target(count * sizeof(T));
    read_list(text, kind, shape, target);
    std::vector<T> values(count);
    if (count > 0) {
        std::memcpy(values.data(), target.data(), target.size());
    }
    return values;
}

template <typename T>
bool refuses(const std::string& text, NumberKind kind, const Shape& shape) {
    try {
        read<T>(text, kind, shape);
    } catch (const JsonListError&) {
        return true;
    }
    return false;
}

void test_nesting_follows_the_shape() {
    const std::vector<float> wanted{1, 2, 3, 4, 5, 6};
    CHECK(read<float>("[1,2,3,4,5,6]", NumberKind::kF32, {2, 3}) == wanted);
    CHECK(read<float>(" [ [1, 2,\n3] ,[4,5,6]\t] ", NumberKind::kF32, {2, 3}) == wanted);
    CHECK(read<float>("[[[1],[2],[3]],[[4],[5],[6]]]", NumberKind::kF32, {2, 3, 1}) == wanted);
    CHECK(read<float>("[7]", NumberKind::kF32, {}) == std::vector<float>{7});
    CHECK(read<float>("[]", NumberKind::kF32, {0, 3}).empty());
    CHECK(read<float>("[[],[]]", NumberKind::kF32, {2, 0, 5}).empty());
    CHECK(read<float>("[]", NumberKind::kF32, {2, 0, 5}).empty());
    for (const char* text : {
             "[[1,2],[3,4],[5,6]]",
             "[[1,2,3],[4,5]]",
             "[1,2,3,4,5]",
             "[1,2,3,4,5,6,7]",
             "[[1,2,3],[4,5,6]",
             "[[1,2,3],[4,5,6]]]",
             "[1,2,3,4,5,6] 7",
             "[1,2,3,4,5,6,]",
             "[,1,2,3,4,5,6]",
             "[1 2 3 4 5 6]",
             "[[[1,2,3],[4,5,6]]]",
             "[[1,2,3],4,5,6]",
             "[1,2,3,[4,5,6]]",
             "",
             "1",
             "null",
             "[",
             "[[",
             "{}",
             "[1,2,3,4,5,\"6\"]",
             "[1,2,3,4,5,null]",
             "[1,2,3,4,5,true]",
             "[1,2,3,4,5,NaN]",
             "[1,2,3,4,5,Infinity]",
         }) {
        CHECK(refuses<float>(text, NumberKind::kF32, {2, 3}));
    }
    CHECK(refuses<float>("[[],[]]", NumberKind::kF32, {0, 2}));
    CHECK(refuses<float>(std::string(100'000, '['), NumberKind::kF32, {1}));
}

// A list of one number. Not by operator+, of which GCC 12 warns wrongly (-Wrestrict).
std::string in_list(const std::string& number) {
    std::string list(1, '[');
    list.append(number);
    list.push_back(']');
    return list;
}

void test_numbers_follow_the_grammar() {
    for (const char* number :
         {"01", "+1", ".5", "5.", "1e", "1e+", "-", "--1", "0x1", "1_0", "inf", "nan", "1.e1"}) {
        const std::string text = std::string("[") + number + "]";
        CHECK(refuses<double>(text, NumberKind::kF64, {1}));
        CHECK(refuses<std::int64_t>(text, NumberKind::kI64, {1}));
    }
    const auto one = [](const std::string& number) {
        return read<double>(in_list(number), NumberKind::kF64, {1}).front();
    };
    CHECK(one("-0.5e+2") == -50);
    CHECK(one("1E2") == 100);
    CHECK(one("1e-400") == 0);
    CHECK(std::signbit(one("-1e-400")));
    CHECK(one("5e-324") == std::numeric_limits<double>::denorm_min());
    CHECK(one(std::string(10'000, '9') + "e-9999") > 9);
    CHECK(refuses<double>("[1e400]", NumberKind::kF64, {1}));
    CHECK(refuses<double>(in_list(std::string(1000, '9')), NumberKind::kF64, {1}));
    CHECK(refuses<float>("[1e39]", NumberKind::kF32, {1}));
    CHECK(read<float>("[1e-45]", NumberKind::kF32, {1}).front() ==
          std::numeric_limits<float>::denorm_min());
}

void test_integers_stay_within_their_type() {
    CHECK((read<std::int8_t>("[-128,127,-0]", NumberKind::kI8, {3}) ==
           std::vector<std::int8_t>{-128, 127, 0}));
    CHECK((read<std::uint64_t>("[18446744073709551615,-0]", NumberKind::kU64, {2}) ==
           std::vector<std::uint64_t>{~0ULL, 0}));
    CHECK(read<std::int64_t>("[-9223372036854775808]", NumberKind::kI64, {1}).front() ==
          std::numeric_limits<std::int64_t>::min());
    CHECK(refuses<std::int8_t>("[128]", NumberKind::kI8, {1}));
    CHECK(refuses<std::uint8_t>("[-1]", NumberKind::kU8, {1}));
    CHECK(refuses<std::int64_t>("[9223372036854775808]", NumberKind::kI64, {1}));
    CHECK(refuses<std::int64_t>("[1.0]", NumberKind::kI64, {1}));
    CHECK(refuses<std::int64_t>("[1e3]", NumberKind::kI64, {1}));
    CHECK((read<std::uint8_t>("[true,false,1,0]", NumberKind::kBool, {4}) ==
           std::vector<std::uint8_t>{1, 0, 1, 0}));
    CHECK(refuses<std::uint8_t>("[2]", NumberKind::kBool, {1}));
}

template <typename T>
void round_trip(NumberKind kind, const std::vector<T>& values) {
    const auto bytes = std::as_bytes(std::span(values));
    const Shape flat{static_cast<std::int64_t>(values.size())};
    const Shape nested{2, static_cast<std::int64_t>(values.size() / 2)};
    for (const Shape& shape : {flat, nested}) {
        const std::vector<T> again = read<T>(write_list(bytes, kind, shape), kind, shape);
        CHECK(std::memcmp(again.data(), values.data(), bytes.size()) == 0);
    }
}

void test_what_is_written_is_read_back() {
    std::mt19937_64 random(1);
    std::vector<float> floats;
    std::vector<double> doubles;
    std::vector<std::int64_t> integers;
    while (floats.size() < 20'000) {
        const std::uint64_t bits = random();
        const auto low = static_cast<std::uint32_t>(bits);
        float small;
        double large;
        std::memcpy(&small, &low, sizeof small);
        std::memcpy(&large, &bits, sizeof large);
        floats.push_back(std::isfinite(small) ? small : 0.1F);
        doubles.push_back(std::isfinite(large) ? large : 0.1);
        integers.push_back(static_cast<std::int64_t>(bits));
    }
    round_trip(NumberKind::kF32, floats);
    round_trip(NumberKind::kF64, doubles);
    round_trip(NumberKind::kI64, integers);
    const std::vector<float> tenth{0.1F, 3};
    CHECK(write_list(std::as_bytes(std::span(tenth)), NumberKind::kF32, Shape{2}) == "[0.1,3]");
    CHECK(write_list({}, NumberKind::kF32, Shape{2, 0}) == "[[],[]]");
    for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
        bool refused = false;
        try {
            write_list(std::as_bytes(std::span(&bad, 1)), NumberKind::kF32, Shape{1});
        } catch (const JsonListError&) {
            refused = true;
        }
        CHECK(refused);
    }
}

void test_lists_are_cut_where_they_are_asked_for() {
    const std::string document =
        R"({"data":[0],"inputs":[{"name":"data\":[","shape":[2],"data" : [[1],[2]]},)"
        R"({"data":["]\"",2],"parameters":{"data":[9]}},{"data":[{"data":[1]}]}]})";
    const CutDocument found = cut_lists(document, 3, "data");
    CHECK(found.rest == R"({"data":[0],"inputs":[{"name":"data\":[","shape":[2],"data" : [0]},)"
                        R"({"data":[1],"parameters":{"data":[9]}},{"data":[{"data":[1]}]}]})");
    CHECK(found.lists.size() == 2);
    const auto list = [&](std::size_t index) {
        const auto [begin, end] = found.lists[index];
        return document.substr(begin, end - begin);
    };
    CHECK(list(0) == "[[1],[2]]");
    CHECK(list(1) == R"(["]\"",2])");
    const CutDocument simple = cut_lists(R"({"x":[[1]],"y":[ [ {}]],"z":{"x":[1]}})", 1, "");
    CHECK(simple.rest == R"({"x":[0],"y":[ [ {}]],"z":{"x":[1]}})");
    for (const char* broken : {"", "[", "\"", "{\"a\":[", "{\"a\":[\"", "{\"a\":[1,2}", "{\"a\\",
                               "{\"a\":", "]]]]", "}}}}{", "{\"a\":[[[", "{\"a\":[\"\\"}) {
        CHECK(cut_lists(broken, 1, "").rest == broken);
    }
}

void test_the_shape_is_that_of_the_first_lists() {
    using gnnserve::shape_of_list;
    CHECK((shape_of_list("[1,2,3]", 8) == Shape{3}));
    CHECK((shape_of_list(" [ [1, 2] ,[3,4],[5,6] ] ", 8) == Shape{3, 2}));
    CHECK((shape_of_list("[]", 8) == Shape{0}));
    CHECK((shape_of_list("[[],[]]", 8) == Shape{2, 0}));
    CHECK((shape_of_list("[[[1],[2]],[[3],[4]],[[5],[6]]]", 8) == Shape{3, 2, 1}));
    CHECK((shape_of_list("[[1],[2,3]]", 8) == Shape{2, 1}));
    CHECK((shape_of_list("[[],[[1]]]", 8) == Shape{2, 0}));
    CHECK((shape_of_list(R"(["a,]","b"])", 8) == Shape{2}));
    CHECK(shape_of_list("7", 8).empty());
    bool refused = false;
    try {
        shape_of_list("[[[1]]]", 2);
    } catch (const JsonListError&) {
        refused = true;
    }
    CHECK(refused);
}

void test_any_bytes_are_borne() {
    std::mt19937 random(2);
    const std::string letters = "[]{}\",:\\0123456789.eE+- \ntruefalsn\"data\"";
    for (int round = 0; round < 200'000; ++round) {
        std::string text(random() % 24, ' ');
        for (char& letter : text) {
            letter = letters[random() % letters.size()];
        }
        cut_lists(text, 1 + static_cast<int>(random() % 3), round % 2 == 0 ? "" : "data");
        const Shape shape{static_cast<std::int64_t>(random() % 3),
                          static_cast<std::int64_t>(random() % 3)};
        refuses<float>(text, NumberKind::kF32, shape);
        gnnserve::shape_of_list(text, 24);
        refuses<std::int16_t>(text, NumberKind::kI16, shape);
        refuses<std::uint8_t>(text, NumberKind::kBool, shape);
    }
}

}  // namespace

int main() {
    test_nesting_follows_the_shape();
    test_numbers_follow_the_grammar();
    test_integers_stay_within_their_type();
    test_what_is_written_is_read_back();
    test_lists_are_cut_where_they_are_asked_for();
    test_the_shape_is_that_of_the_first_lists();
    test_any_bytes_are_borne();
    return 0;
}
