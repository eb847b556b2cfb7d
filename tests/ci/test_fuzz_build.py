"""What OSS-Fuzz builds: here with any compiler, and a stand-in for libFuzzer that reads files."""

import os
import subprocess

from bench.kit.result import ROOT
from bench.kit.waiting import PATIENCE_S
from tests.fuzz.targets import infer_seeds

ENGINE = """
#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
int main(int count, char** names) {
    for (int i = 1; i < count; ++i) {
        std::ifstream file(names[i], std::ios::binary);
        const std::string text{std::istreambuf_iterator<char>(file), {}};
        LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
    }
}
"""


def test_the_target_takes_messages_and_anything_else(tmp_path):
    engine = tmp_path / "engine.cpp"
    engine.write_text(ENGINE)
    environment = {
        **os.environ, "OUT": str(tmp_path), "CXX": "c++", "CXXFLAGS": "-O0",
        "LIB_FUZZING_ENGINE": str(engine),
    }  # fmt: skip
    subprocess.run(
        [ROOT / ".clusterfuzzlite" / "build.sh"],
        cwd=ROOT, env=environment, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    files = []
    for number, seed in enumerate([*infer_seeds(), b"", b"\1", b"\1\xff" * 100]):
        files.append(tmp_path / str(number))
        files[-1].write_bytes(seed)
    subprocess.run([tmp_path / "parse_fuzz", *files], check=True, timeout=PATIENCE_S)
