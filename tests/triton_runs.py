"""Runs of the Triton kernel without a GPU, each in a process of its own: `python triton_runs.py interpret | compile`.

`interpret` turns tensors on the CPU through Triton's interpreter; `compile` builds the kernel for three GPUs.
Either prints one line of JSON.
"""

import itertools
import json
import os
import sys

SIZES = ((2, 3, 7, 16, 5), (1, 1, 1, 10, 5), (2, 2, 33, 24, 12), (1, 5, 4, 6, 1))  # batch, heads, rows, head_dim, pairs
TARGETS = (("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64))


def interpret():
    import torch

    from ropewalk.kernels import triton
    from turns import turned_as_complex

    generator = torch.Generator().manual_seed(0)
    found = []
    kinds = itertools.product(SIZES, ("half", "interleaved"), ("float32", "bfloat16", "float16", "float64"))
    for (batch, heads, rows, width, pairs), layout, name in kinds:
        for per_batch, token_major, in_place, back in ((0, 0, 0, 0), (1, 1, 0, 1), (1, 0, 1, 0), (0, 1, 1, 1)):
            dtype = getattr(torch, name)
            shape = (batch, rows, heads, width) if token_major else (batch, heads, rows, width)
            x = torch.randn(shape, generator=generator).to(dtype)
            x = x.transpose(1, 2) if token_major else x
            angles = 9 * torch.randn(batch if per_batch else 1, 1, rows, pairs, generator=generator)
            angles = angles.double() if dtype == torch.float64 else angles
            cos, sin = angles.cos(), angles.sin()
            expected = turned_as_complex(x, cos, -sin if back else sin, layout)
            rest = x[..., 2 * pairs :].clone()
            out = x if in_place else torch.full_like(x, float("nan"))
            assert triton.write(out, x, cos, sin, layout, bool(back))
            ulp = expected.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
            wrong = ((out.double() - expected).abs() / ulp).max().item() if name != "float32" else 0.0
            found.append({
                "case": f"{name} {layout} {tuple(x.shape)} {pairs} {per_batch}{token_major}{in_place}{back}",
                "ulps": wrong,
                "error": (out.double() - expected).abs().max().item(),
                "rest": torch.equal(rest, out[..., 2 * pairs :]),
            })  # fmt: skip
    five = torch.randn(2, 2, 2, 3, 4, generator=generator)
    angles = torch.randn(3, 2, generator=generator)
    error = turned_as_complex(five, angles.cos(), angles.sin(), "half")
    assert triton.write(five, five, angles.cos(), angles.sin(), "half", False)
    found.append({"case": "five axes", "ulps": 0.0, "error": (five.double() - error).abs().max().item(), "rest": True})
    refused = torch.randn(2, 4, 6).transpose(1, 2)
    found.append({"case": "refused", "ulps": 0.0, "error": 0.0,
                  "rest": not triton.write(refused, refused, angles[:1], angles[:1], "half", False)})  # fmt: skip
    return found


def compiled():
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ropewalk.kernels.triton import turn_rows

    sizes = ("ROWS", "PAIRS", "REST", "INTERLEAVED", "BACK", "REAL")
    counts = [name for name in turn_rows.arg_names if name not in ("out", "x", "cos", "sin", *sizes)]
    found = []
    for target, kind, interleaved in itertools.product(TARGETS, ("bf16", "fp16", "fp32"), (False, True)):
        signature = {"out": f"*{kind}", "x": f"*{kind}", "cos": "*fp32", "sin": "*fp32"}
        signature |= dict.fromkeys(counts, "i64") | dict.fromkeys(sizes, "constexpr")
        values = {"ROWS": 32, "PAIRS": 64, "REST": 16, "INTERLEAVED": interleaved, "BACK": True}
        values["REAL"] = triton.language.float32
        made = triton.compile(ASTSource(turn_rows, signature, values), target=GPUTarget(*target))
        found.append({"target": f"{target[0]} {target[1]}", "kind": kind, "made": sorted(made.asm)})
    return found


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    if sys.argv[1] == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    print(json.dumps({"interpret": interpret, "compile": compiled}[sys.argv[1]]()))
