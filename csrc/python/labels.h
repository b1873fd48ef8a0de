#pragma once

#include <pybind11/pybind11.h>

void bind_labels(pybind11::module_& m);
