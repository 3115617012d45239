#!/usr/bin/env python3
"""Every shipped run file, raw and resolved, satisfies the JSON schema the program prints; a wrong one does not.

    python3 tests/src/config/check_schema.py build/cpu/kestrel configs
"""
import json
import pathlib
import re
import subprocess
import sys

import jsonschema

program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
schema = json.loads(subprocess.run([program, "config", "--schema"], check=True, capture_output=True, text=True).stdout)
jsonschema.validators.validator_for(schema).check_schema(schema)
validator = jsonschema.validators.validator_for(schema)(schema)


def without_comments(text):
    return re.sub(r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/', lambda m: m.group(1) or "", text, flags=re.S)


files = sorted(folder.rglob("*.json"))
assert len(files) > 40, f"only {len(files)} run files below {folder}"
for path in files:
    validator.validate(json.loads(without_comments(path.read_text())))
    resolved = subprocess.run([program, "config", str(path)], check=True, capture_output=True, text=True).stdout
    validator.validate(json.loads(resolved))
    wrong = json.loads(resolved)
    wrong["train"]["micro_batch_size"] = "four"
    assert not validator.is_valid(wrong), f"{path}: a mistyped field passes the schema"
print(f"{len(files)} run files satisfy the schema")
