// Names that a library shows to those who load it.
#pragma once

#define GNNSERVE_EXPORT extern "C" __attribute__((visibility("default")))
