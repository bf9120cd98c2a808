"""Stand-in for SGLang's CPU kernel package: importable, with the two ops that the generic CPU path calls."""

import numpy as np
import torch

TILE = 32768  # elements that the hash works on at once, which stay in a core's cache


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache locations into its row: row[start:end] = the next end-start locations."""
    done = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def _rotate_left(h: np.ndarray, bits: int) -> np.ndarray:
    return (h << np.uint32(bits)) | (h >> np.uint32(32 - bits))


def _scramble(key: np.ndarray) -> np.ndarray:
    return _rotate_left(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)


def _absorb(h: np.ndarray, scrambled: np.ndarray) -> np.ndarray:
    """One 4-byte block of MurmurHash3 (x86, 32 bit; Austin Appleby, public domain)."""
    return _rotate_left(h ^ scrambled, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def murmur_hash32(seed: np.ndarray, positions: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """MurmurHash3 of (seed: 8 bytes, position: 4 bytes, column: 4 bytes): [n], [n], [m] -> uint32 [n, m]."""
    h = np.zeros(len(seed), np.uint32)
    for block in (seed & np.uint64(0xFFFFFFFF), seed >> np.uint64(32), positions):
        h = _absorb(h, _scramble(block.astype(np.uint32)))
    scrambled = _scramble(columns.astype(np.uint32))
    hashed = np.empty((len(h), len(scrambled)), np.uint32)
    wide = max(1, min(len(scrambled), TILE))
    high = TILE // wide
    scratch = np.empty((high, wide), np.uint32)
    for row in range(0, len(h), high):
        for column in range(0, len(scrambled), wide):
            part = hashed[row : row + high, column : column + wide]
            np.bitwise_xor(h[row : row + high, None], scrambled[None, column : column + wide], out=part)
            _finish(part, scratch[: part.shape[0], : part.shape[1]])
    return hashed


def _finish(h: np.ndarray, scratch: np.ndarray) -> None:
    """The last block's rest and the final mix, in place: _absorb without the xor, then xor with the length, fmix32."""
    np.right_shift(h, 19, out=scratch)
    h <<= np.uint32(13)
    h |= scratch
    h *= np.uint32(5)
    h += np.uint32(0xE6546B64)
    h ^= np.uint32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        np.right_shift(h, shift, out=scratch)
        h ^= scratch
        h *= np.uint32(factor)
    np.right_shift(h, 16, out=scratch)
    h ^= scratch


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_library.impl(
    "murmur_hash32_cpu",
    lambda seed, positions, columns: torch.from_numpy(murmur_hash32(seed.numpy(), positions.numpy(), columns.numpy())),
    "CPU",
)


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in; install a build of sgl-kernel for CPUs")

    return missing
