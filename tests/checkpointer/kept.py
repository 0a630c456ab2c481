"""What retention removes, written without a look at the library."""


def removed_steps(steps, *, keep_last, keep_every=None, keep=(), in_use=()):
    """Steps that are removed, as a set."""
    newest_first = sorted(steps, reverse=True)
    kept = set(newest_first if keep_last is None else newest_first[:keep_last])
    kept |= {step for step in steps if keep_every is not None and step % keep_every == 0}
    kept |= {step for step in steps if step in keep}
    return set(steps) - kept - set(in_use)
