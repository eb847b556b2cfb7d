#!/usr/bin/env bash
# Builds the targets of libFuzzer into $OUT, as ClusterFuzzLite and OSS-Fuzz ask for it, in a checkout.
set -euo pipefail
# shellcheck disable=SC2086  # flags are words
$CXX $CXXFLAGS -std=c++20 -DGNNSERVE_LIBFUZZER -Icsrc/include -Icsrc/tests \
    csrc/fuzz/parse_fuzz.cpp csrc/src/infer_message.cpp -o "$OUT/parse_fuzz" $LIB_FUZZING_ENGINE
zip -jq "$OUT/parse_fuzz_seed_corpus.zip" tests/fuzz/corpus/infer/*
