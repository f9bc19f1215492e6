"""Prints the seconds of train steps of GPT-2 in PyTorch.

    python benchmarks/torch_steps.py 12 768 12 50257 1024 32 --steps 200
    python benchmarks/torch_steps.py 6 384 6 8192 256 16 --nanogpt FOLDER    its model.py

Layers, width, heads, vocabulary, tokens of a sequence, sequences. The model is that of transformers
or of a clone of nanoGPT; compiled, with fused AdamW and clipping. In bfloat16 (autocast) on a GPU,
in float32 on CPU.
"""

import argparse
import sys
import time

import torch  # type: ignore


def build(
    nanogpt: str | None, *, layers: int, width: int, heads: int, vocabulary: int, length: int
):
    """Returns the model and a function from ids and targets to the loss."""
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": vocabulary}
    if nanogpt:
        sys.path.insert(0, nanogpt)
        from model import GPT, GPTConfig  # type: ignore

        model = GPT(GPTConfig(**sizes, block_size=length, dropout=0.0, bias=True))
        return model, lambda ids, targets: model(ids, targets)[1]
    from transformers import GPT2Config, GPT2LMHeadModel  # type: ignore

    none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    model = GPT2LMHeadModel(
        GPT2Config(**sizes, **none, n_positions=length, attn_implementation="sdpa")
    )

    def loss_of(ids, targets):
        logits = model(ids, use_cache=False).logits.view(-1, vocabulary)
        return torch.nn.functional.cross_entropy(logits.float(), targets.view(-1))

    return model, loss_of


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Steps of GPT-2 in PyTorch.")
    parser.add_argument("sizes", type=int, nargs=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--nanogpt", help="folder of nanoGPT's model.py")
    options = parser.parse_args()
    layers, width, heads, vocabulary, length, batch = options.sizes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    model, loss_of = build(
        options.nanogpt,
        layers=layers,
        width=width,
        heads=heads,
        vocabulary=vocabulary,
        length=length,
    )
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    loss_of = torch.compile(loss_of)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for step in range(options.steps):
        ids = torch.randint(vocabulary, (batch, length + 1), device=device)
        wait()
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait()
        print(f"completed step: {step}, seconds: {time.perf_counter() - began:.4f}", flush=True)


if __name__ == "__main__":
    main()
