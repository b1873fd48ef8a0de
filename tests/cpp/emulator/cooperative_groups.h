// Nothing: what csrc/core takes from it is compiled for devices with clusters alone.
#pragma once
