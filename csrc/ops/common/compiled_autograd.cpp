// torch/csrc/autograd/custom_function.h calls torch::dynamo::autograd::getPyCompilerInterface() when compiled autograd
// traces a backward. That function lies in libtorch_cpu and needs no Python, but its name is the one "Py" that our
// library would want from outside, and "no undefined Py symbol" is how a C++ user checks that the library runs without
// Python. So it is looked up by name when it is called.
#include <dlfcn.h>

#define TORCH_FASTDET_PY_COMPILER_INTERFACE "_ZN5torch6dynamo8autograd22getPyCompilerInterfaceEv"

// Returns what the real function does: a reference, which is a pointer in the ABI.
extern "C" __attribute__((visibility("hidden"))) const void* torch_fastdet_py_compiler_interface() __asm__(
    TORCH_FASTDET_PY_COMPILER_INTERFACE);

const void* torch_fastdet_py_compiler_interface() {
  using Function = const void* (*)();
  static const auto function = [] {
    void* torch_cpu = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Function>(dlsym(torch_cpu, TORCH_FASTDET_PY_COMPILER_INTERFACE));
  }();
  return function();
}
