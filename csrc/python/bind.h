#pragma once

#include <pybind11/pybind11.h>

void bind_labels(pybind11::module_& m);
void bind_trackers(pybind11::module_& m);
