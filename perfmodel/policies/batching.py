"""Batching policies: `chunked` (prompts share iterations with decode rows) and `prefill-first` (prompts go ahead of them)."""

from perfmodel.batching import BatchView, Plan


class Chunked:
    """Decode rows first, then prompt chunks first come first served, up to `token_budget` tokens an iteration.

    A prompt spread over several instances takes hundreds of iterations, each as long as its remote prefix is. It makes do with
    an eighth of the budget as long as there is anything else to run here.
    """

    first_come = True

    def plan(self, view: BatchView) -> Plan:
        budget = view.token_budget - view.num_decode_rows
        chunks: list[tuple[int, int]] = []
        admit: list[int] = []
        for row in view.prefilling:
            if budget <= 0:
                return Plan((), chunks)
            share = max(1, budget // 8) if row.streams and _has_others(view) else budget
            tokens = min(share, view.computable_tokens(row))
            if tokens:
                chunks.append((row.req_id, tokens))
                budget -= tokens
        for row in view.admissible() if budget > 0 else ():
            admit.append(row.req_id)
            chunks.append((row.req_id, min(budget, row.remaining_tokens)))
            budget -= chunks[-1][1]
            if budget <= 0:
                break
        return Plan(admit, chunks)


def _has_others(view: BatchView) -> bool:
    """Besides one prompt, something runs or can."""
    return bool(view.num_decode_rows) or len(view.prefilling) > 1 or next(view.admissible(), None) is not None


class PrefillFirst:
    """Whole prompts up to `token_budget` tokens, a longer one alone; decode rows wait for them (vLLM of 2023)."""

    first_come = True

    def plan(self, view: BatchView) -> Plan:
        admit: list[int] = []
        ready = [(row.req_id, view.computable_tokens(row)) for row in view.prefilling]
        chunks = [(req_id, tokens) for req_id, tokens in ready if tokens]
        tokens = sum(n for _, n in chunks)
        for row in view.admissible():
            if chunks and tokens + row.remaining_tokens > view.token_budget:
                break
            admit.append(row.req_id)
            chunks.append((row.req_id, row.remaining_tokens))
            tokens += row.remaining_tokens
        return Plan(admit, chunks, decode=not chunks)
