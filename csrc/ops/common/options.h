// Options that travel together are one struct, so that only the schema and this struct name an option, and no backend
// lists it again.
//
//   struct ResizeOptions {
//     double scale;
//     bool antialias;
//     using Types = std::tuple<double, bool>;  // of the fields, in the schema's order
//   };
//   template <class Backend>
//   at::Tensor resize(const at::Tensor& x, const ResizeOptions& options);
//   ...
//   m.impl("resize", unpack<&resize<Backend>>);  // registers at::Tensor(const at::Tensor&, double, bool)
//
// The dispatcher compares these types with the schema when the library is loaded.
#pragma once

#include <array>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

namespace torch_fastdet {

// Map a parameter P to its types in the schema: those of the fields of an options struct or a tuple, else P itself.
template <typename P, typename = void>
struct SchemaTypes {
  using type = std::tuple<P>;
  static constexpr bool kOptions = false;
};
template <typename P>
struct SchemaTypes<P, std::void_t<typename std::decay_t<P>::Types>> {
  using type = typename std::decay_t<P>::Types;
  static constexpr bool kOptions = true;
};
template <typename... Fields>
struct SchemaTypes<const std::tuple<Fields...>&> {
  using type = std::tuple<Fields...>;
  static constexpr bool kOptions = true;
};

// Build a struct of options from its fields, which start at kFirst among `values`.
template <typename Options, size_t kFirst, typename Values, size_t... kIndex>
Options options_from(const Values& values, std::index_sequence<kIndex...>) {
  using Types = typename SchemaTypes<const Options&>::type;
  return {static_cast<std::tuple_element_t<kIndex, Types>>(std::get<kFirst + kIndex>(values))...};
}
template <typename Options>
Options options_from(const typename Options::Types& values) {
  return options_from<Options, 0>(values, std::make_index_sequence<std::tuple_size_v<typename Options::Types>>());
}

template <auto kFunction, typename Function = decltype(kFunction)>
struct Unpacked;
template <auto kFunction, typename Result, typename... Parameters>
struct Unpacked<kFunction, Result (*)(Parameters...)> {
  using Types = decltype(std::tuple_cat(std::declval<typename SchemaTypes<Parameters>::type>()...));

  // Compute where each parameter's values start.
  static constexpr auto kFirst = [] {
    constexpr size_t sizes[] = {std::tuple_size_v<typename SchemaTypes<Parameters>::type>...};
    std::array<size_t, sizeof...(Parameters)> first{};
    for (size_t i = 1; i < first.size(); ++i) first[i] = first[i - 1] + sizes[i - 1];
    return first;
  }();

  template <typename P, size_t kAt, typename Values>
  static decltype(auto) take(const Values& values) {
    if constexpr (SchemaTypes<P>::kOptions) {
      constexpr size_t kFields = std::tuple_size_v<typename SchemaTypes<P>::type>;
      return options_from<std::decay_t<P>, kAt>(values, std::make_index_sequence<kFields>());
    } else {
      return static_cast<P>(std::get<kAt>(values));
    }
  }

  template <typename Values, size_t... kParameter>
  static Result call(const Values& values, std::index_sequence<kParameter...>) {
    return kFunction(take<Parameters, kFirst[kParameter]>(values)...);
  }

  template <typename AsTuple>
  struct Registered;
  template <typename... Each>
  struct Registered<std::tuple<Each...>> {
    using Signature = Result(Each...);
    static Result call(Each... each) {
      return Unpacked::call(std::tuple<const Each&...>(each...), std::index_sequence_for<Parameters...>());
    }
  };
};

// Register this function for kFunction; unpacked_signature is its type.
template <auto kFunction>
constexpr auto unpack = &Unpacked<kFunction>::template Registered<typename Unpacked<kFunction>::Types>::call;
template <auto kFunction>
using unpacked_signature =
    typename Unpacked<kFunction>::template Registered<typename Unpacked<kFunction>::Types>::Signature;

}  // namespace torch_fastdet
