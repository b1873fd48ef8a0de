// This file is empty because csrc/core uses cooperative groups only on devices with clusters.
#pragma once
