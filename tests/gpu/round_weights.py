#!/usr/bin/env python3
"""Copies a model folder with every weight rounded to the nearest BF16 value, still stored as F32.

    python3 tests/gpu/round_weights.py MODEL_DIR OUT_DIR

What `kestrel parity --precision fp32` says of the copy is the floor of a BF16 run: the error that rounding the weights
makes by itself, with all arithmetic in F32.  The balance biases stay as they are, as they do in training.  Needs numpy.
"""
import json
import pathlib
import shutil
import struct
import sys

import numpy

source, target = map(pathlib.Path, sys.argv[1:])
target.mkdir(parents=True, exist_ok=True)
shutil.copy(source / "config.json", target / "config.json")
file = bytearray((source / "model.safetensors").read_bytes())
size = struct.unpack_from("<Q", file)[0]
for name, entry in json.loads(file[8 : 8 + size]).items():
    if name == "__metadata__" or name.endswith("e_score_correction_bias"):
        continue
    assert entry["dtype"] == "F32", f"{name} is {entry['dtype']}, expected F32"
    begin, end = (8 + size + offset for offset in entry["data_offsets"])
    bits = numpy.frombuffer(file[begin:end], numpy.uint32).astype(numpy.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # to nearest, ties to even
    file[begin:end] = bits.astype(numpy.uint32).tobytes()
(target / "model.safetensors").write_bytes(file)
