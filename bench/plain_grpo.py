"""A hand-written GRPO on two-digit addition: one file, plain PyTorch, CPU, no framework.

The yardstick for what the quickstart must learn and for what a framework may cost on top. It does the least possible:
no config, no masks for several turns, no ref model, no queue. It starts from an exported model of `tandem sft`:
python bench/plain_grpo.py --weights runs/quickstart/sft/final [--seed 0] [--out log.json]
Prints one line per 10 steps; `cpu` is this process's own processor time in seconds, evaluation left out. One update is
made per batch of samples (`--epochs 1`), so the ratio is 1 and the clip never binds; `--epochs 2` makes it bind.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn

VOCAB = "\n0123456789+-*=>abcdefghijklmnop?,() "  # "\n" ends an answer
INDEX = {c: i for i, c in enumerate(VOCAB)}
EOS, MAX_NEW, D, LAYERS, HEADS = 0, 4, 128, 4, 4


def encode(text):
    return [INDEX[c] for c in text]


def decode(ids):
    return "".join(VOCAB[i] for i in ids).split("\n")[0]


HELD_OUT = set(random.Random(10_000).sample([(x, y) for x in range(100) for y in range(100)], 512))  # never trained on


def as_text(x, y):
    return f"{x:2d}+{y:2d}=", str(x + y)


def problem(rng):
    while (pair := (rng.randint(0, 99), rng.randint(0, 99))) in HELD_OUT:
        pass
    return as_text(*pair)


def rotate(x, offset):
    half = x.shape[-1] // 2
    freq = 10000 ** (-torch.arange(half).float() / half)
    angle = torch.outer(torch.arange(offset, offset + x.shape[-2]).float(), freq)
    cos, sin, a, b = angle.cos(), angle.sin(), x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        hidden = D * 8 // 3 // 8 * 8
        self.norm1, self.norm2 = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.gate, self.up = nn.Linear(D, hidden, bias=False), nn.Linear(D, hidden, bias=False)
        self.down = nn.Linear(hidden, D, bias=False)

    def forward(self, x, cache):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        offset = cache[0].shape[2] if cache else 0
        q, k = rotate(q, offset), rotate(k, offset)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cache[:] = [k, v]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, D))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(VOCAB), D)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, len(VOCAB), bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids, caches=None):
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches is not None else None)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(model, prompts, greedy=False):
    """prompts (B, P) -> sampled ids (B, <=MAX_NEW) and their log-probs."""
    caches = [[] for _ in range(LAYERS)]
    logits, ids, logprobs = model(prompts, caches)[:, -1], [], []
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(MAX_NEW):
        lp = F.log_softmax(logits, -1)
        token = lp.argmax(-1) if greedy else torch.multinomial(lp.exp(), 1)[:, 0]
        token = torch.where(done, EOS, token)
        ids.append(token)
        logprobs.append(lp.gather(1, token[:, None])[:, 0])
        done |= token == EOS
        if done.all():
            break
        logits = model(token[:, None], caches)[:, -1]
    return torch.stack(ids, 1), torch.stack(logprobs, 1)


def accuracy(model, problems):
    ids, _ = generate(model, torch.tensor([encode(p) for p, _ in problems]), greedy=True)
    return sum(decode(row) == a for row, (_, a) in zip(ids.tolist(), problems, strict=True)) / len(problems)


def load(model, folder):
    """Copy the weights of a Hugging Face Llama of the same shape."""
    ids = json.loads((Path(folder) / "tokenizer.json").read_text())["model"]["vocab"]
    rows = [ids[character] for character in VOCAB]
    with safe_open(Path(folder) / "model.safetensors", "pt") as saved, torch.no_grad():
        get = saved.get_tensor
        model.embed.weight.copy_(get("model.embed_tokens.weight")[rows])
        model.head.weight.copy_(get("lm_head.weight")[rows])
        model.norm.weight.copy_(get("model.norm.weight"))
        for i, block in enumerate(model.blocks):
            layer = f"model.layers.{i}."
            block.norm1.weight.copy_(get(layer + "input_layernorm.weight"))
            block.norm2.weight.copy_(get(layer + "post_attention_layernorm.weight"))
            block.qkv.weight.copy_(torch.cat([get(layer + f"self_attn.{x}_proj.weight") for x in "qkv"]))
            block.out.weight.copy_(get(layer + "self_attn.o_proj.weight"))
            block.gate.weight.copy_(get(layer + "mlp.gate_proj.weight"))
            block.up.weight.copy_(get(layer + "mlp.up_proj.weight"))
            block.down.weight.copy_(get(layer + "mlp.down_proj.weight"))


def grpo_step(model, optimizer, rng, prompts, epochs, group=8, clip=0.2):
    rows = [problem(rng) for _ in range(prompts)]
    prompt = torch.tensor([encode(p) for p, _ in rows]).repeat_interleave(group, 0)
    answers = [a for _, a in rows for _ in range(group)]
    ids, old = generate(model, prompt)
    reward = torch.tensor([float(decode(row) == a) for row, a in zip(ids.tolist(), answers, strict=True)])
    grouped = reward.view(prompts, group)
    advantage = grouped - grouped.mean(1, keepdim=True)  # not divided by the group's std: steadier on this task
    end = ids == EOS
    mask = ((end.cumsum(1) - end.int()) == 0).float()  # up to and with the first EOS
    adv = advantage.flatten()[:, None]
    for _ in range(epochs):
        logits = model(torch.cat([prompt, ids], 1)[:, :-1])[:, -ids.shape[1] :]
        ratio = (F.log_softmax(logits, -1).gather(2, ids[..., None])[..., 0] - old).exp()
        loss = -(torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return reward.mean().item(), int(mask.sum())


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--weights", required=True)
    args.add_argument("--steps", type=int, default=150)
    args.add_argument("--prompts", type=int, default=64)
    args.add_argument("--epochs", type=int, default=1)
    args.add_argument("--out")
    args = args.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng, held_out = random.Random(args.seed), [as_text(x, y) for x, y in sorted(HELD_OUT)]
    model, log = Model(), []
    load(model, args.weights)
    print(f"start: greedy {accuracy(model, held_out):.3f}", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, betas=(0.9, 0.95))
    cpu, tokens = 0.0, 0
    for step in range(1, args.steps + 1):
        start = time.process_time()
        reward, count = grpo_step(model, optimizer, rng, args.prompts, args.epochs)
        cpu, tokens = cpu + time.process_time() - start, tokens + count
        log.append({"step": step, "reward": reward, "cpu": cpu})
        if step % 10 == 0:
            mean = sum(row["reward"] for row in log[-10:]) / 10
            print(
                f"step {step} reward {mean:.3f} greedy {accuracy(model, held_out):.3f} tokens {tokens} cpu {cpu:.1f}",
                flush=True,
            )
    if args.out:
        result = {"log": log, "greedy": accuracy(model, held_out), "cpu_per_step": cpu / args.steps}
        Path(args.out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
