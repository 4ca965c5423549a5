"""SGLang's own API, `/generate`: the shape of its answers. A stream repeats what was said before."""

from __future__ import annotations

import msgspec

from worker.engines.simulated.forms import Form, event


class NativeForm(Form):
    _text = ""

    def whole(self, iterations: int) -> bytes:
        return msgspec.json.encode(self._frame(self.answer.text, self.answer.ids.size, iterations))

    def chunk(self, produced: int) -> bytes:
        """The last one comes with `end`: it tells why the answer ended."""
        (cursor,) = self.cursors
        self._text += "".join(delta.text for delta in cursor.advance(produced) if delta.part.kind == "text")
        return b"" if cursor.done else event(self._frame(self._text, produced, None))

    def end(self, iterations: int) -> bytes:
        last = event(self._frame(self.answer.text, self.answer.ids.size, iterations))
        return last + self.comment(iterations) + b"data: [DONE]\n\n"

    def _frame(self, text: str, tokens: int, iterations: int | None) -> dict[str, object]:
        """`iterations` of a whole answer."""
        answer = self.answer
        finish: dict[str, object] | None = None
        if iterations is not None:
            finish = {"type": answer.finish}
            if answer.finish == "length":
                finish["length"] = tokens
            else:
                finish["matched"] = answer.stopped_by
        meta = {
            "id": self.rid,
            "finish_reason": finish,
            "prompt_tokens": self.job.tokens.size,
            "completion_tokens": tokens,
            "cached_tokens": self.cached,
            "decode_iterations": iterations or 0,
        }
        return {"text": text, "output_ids": answer.ids[:tokens].tolist(), "meta_info": meta}
