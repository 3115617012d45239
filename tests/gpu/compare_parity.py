#!/usr/bin/env python3
"""Holds `kestrel parity` output against a golden file: loss, logits and every gradient.

    python3 tests/gpu/compare_parity.py OUT.safetensors EXPECTED.safetensors [--json]

Prints the relative error of the loss, of the logits, the worst relative error and the worst cosine over gradient tensors.
Needs numpy.  Exit status 0 always: the caller holds the numbers against its bounds.
"""
import json
import struct
import sys

import numpy

DTYPES = {"F32": numpy.float32, "F64": numpy.float64, "I32": numpy.int32, "I64": numpy.int64}


def load(path):
    with open(path, "rb") as f:
        size = struct.unpack("<Q", f.read(8))[0]
        header = json.loads(f.read(size))
        data = f.read()
    header.pop("__metadata__", None)
    return {
        name: numpy.frombuffer(data[e["data_offsets"][0] : e["data_offsets"][1]], DTYPES[e["dtype"]]).astype(numpy.float64)
        for name, e in header.items()
    }


def relative(a, b):
    norm = numpy.linalg.norm(b)
    return float(numpy.linalg.norm(a - b) / (norm if norm > 0 else 1.0))


got, want = load(sys.argv[1]), load(sys.argv[2])
result = {
    "loss": relative(got["loss"], want["loss"]),
    "logits": relative(got["logits"], want["logits"]),
    "worst_gradient": 0.0,
    "worst_gradient_name": "",
    "worst_cosine": 1.0,
    "worst_cosine_name": "",
    "gradients": 0,
}
cosines = []
for name in sorted(n for n in want if n.startswith("grad.")):
    a, b = got[name], want[name]
    result["gradients"] += 1
    if not numpy.all(numpy.isfinite(a)):
        result["worst_gradient"], result["worst_gradient_name"] = float("inf"), name
        continue
    error = relative(a, b)
    if error > result["worst_gradient"]:
        result["worst_gradient"], result["worst_gradient_name"] = error, name
    norms = numpy.linalg.norm(a) * numpy.linalg.norm(b)
    if numpy.linalg.norm(b) > 0:
        cosine = float(a @ b / norms) if norms > 0 else 0.0
        cosines.append(cosine)
        if cosine < result["worst_cosine"]:
            result["worst_cosine"], result["worst_cosine_name"] = cosine, name
result["median_cosine"] = float(numpy.median(cosines))
result["cosines_of_0.999"] = sum(c >= 0.999 for c in cosines)
if "--json" in sys.argv:
    print(json.dumps(result))
else:
    print(" ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items()))
