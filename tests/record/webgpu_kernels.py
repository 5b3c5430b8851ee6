"""Records in ``lists/kernels.json`` what WebGPU has kernels for.

    python -m tests.record.webgpu_kernels --plugin PYTHON --wheel PYTHON

``--plugin`` is an interpreter with stock onnxruntime and onnxruntime-ep-webgpu, which tells its registry where it has a
device (software Vulkan does). ``--wheel`` is one with onnxruntime-webgpu, which tells nothing of the
kind: each registration of the plugin's is tried there in a model of one node. Both need onnx.

``WebGpuExecutionProvider`` gets what both have, ``WebGpuExecutionProvider/plugin`` all that the plugin has.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from onnx import defs

from tests.helpers.kernel_registry import DOMAINS, Registry, installed_version, read, record
from tests.helpers.one_node import Contrib, Schema, one_node, questions
from tests.helpers.webgpu_sessions import PROVIDER, devices, lands, software_allowed
from tests.helpers.where import ROOT

FIRST, LAST = 7, 23
"""The opsets in which kernels are tried: onnxruntime knows none before, and programs are lowered to none after."""


def registry() -> Registry:
    """What the plugin has registered. To be called in an interpreter that has it."""
    from onnxruntime.capi import onnxruntime_pybind11_state as bindings

    if not devices():
        sys.exit("The plugin lists no device: there is neither a graphics card nor software Vulkan.")
    return read(bindings.get_registered_ep_kernel_defs(PROVIDER))


def in_both(plugin: Registry) -> Registry:
    """What of a registry this interpreter has kernels for as well."""
    both: Registry = {domain: {} for domain in DOMAINS}
    for domain, operators in plugin.items():
        schemas = _schemas(domain)
        for op_type, registrations in operators.items():
            kept: dict[str, dict[str, list[str]]] = {}
            for versions, params in registrations.items():
                kept |= _tried(versions, params, schemas.get(op_type, {}))
            if kept:
                both[domain][op_type] = kept
    return both


def _tried(versions: str, params: dict[str, list[str]], schemas: dict[int, Schema]) -> dict[str, dict[str, list[str]]]:
    """A registration as far as it is one here: whole, or by single versions where they differ."""
    first, _, last = versions.rstrip("+").partition("-")
    served = [v for v in schemas if int(first) <= v <= int(last or first)]
    answers = {str(v): _types_here(schemas[v], v, params) for v in served}
    if answers and all(each == params for each in answers.values()):
        return {versions: params}
    return {v: each for v, each in answers.items() if each is not None}


def _types_here(schema: Schema, version: int, params: dict[str, list[str]]) -> dict[str, list[str]] | None:
    """Of each parameter the element types with which a node lands on WebGPU; None where none does."""
    asked = [types for types in questions(schema) if all(types[p] in params[p] for p in params if p in types)]
    opset = version if schema.domain else max(version, FIRST)
    landed = [types for types in asked if lands(one_node(schema, types, opset))]
    if not landed:
        return None
    return {
        # What no question holds, an output or input that is left out, is as the plugin says.
        param: sorted({types[param] for types in landed} | (set(every) - {types[param] for types in asked}))
        if param in landed[0]
        else every
        for param, every in params.items()
    }


def _schemas(domain: str) -> dict[str, dict[int, Schema]]:
    """By operator and version."""
    found: dict[str, dict[int, Schema]] = {}
    for schema in _all_schemas(domain):
        found.setdefault(schema.name, {})[schema.since_version] = schema
    if domain == "ai.onnx":  # of the versions up to the first opset, the newest alone can be written
        found = {
            name: {v: s for v, s in of.items() if v <= LAST and not any(v < w <= FIRST for w in of)}
            for name, of in found.items()
        }
    return found


def _all_schemas(domain: str) -> Iterator[Schema]:
    if domain == "ai.onnx":
        yield from (s for s in defs.get_all_schemas_with_history() if not s.domain and not s.deprecated)
        return
    from onnxruntime.capi import onnxruntime_pybind11_state as bindings

    yield from (Contrib(s) for s in bindings.get_all_operator_schema() if s.domain == domain)


def _asked(python: str, question: str, given: str = "") -> Any:
    command = [python, "-m", "tests.record.webgpu_kernels", question]
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, env=software_allowed(), cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("question", nargs="?", choices=("registry", "in_both"), help=argparse.SUPPRESS)
    parser.add_argument("--plugin", metavar="PYTHON")
    parser.add_argument("--wheel", metavar="PYTHON")
    args = parser.parse_args()
    if args.question:
        found = registry() if args.question == "registry" else in_both(json.load(sys.stdin))
        print("\n" + json.dumps([installed_version(), found]))
    elif args.plugin and args.wheel:
        of_plugin, plugin = _asked(args.plugin, "registry")
        of_wheel, both = _asked(args.wheel, "in_both", json.dumps(plugin))
        record(PROVIDER, both, f"what the plugin and {of_wheel} both have, opsets {FIRST} to {LAST}")
        record(f"{PROVIDER}/plugin", plugin, of_plugin)
    else:
        parser.error("--plugin and --wheel are needed")


if __name__ == "__main__":
    main()
