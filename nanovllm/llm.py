"""`LLM`: a model to generate text with."""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Step
from nanovllm.engine.sequence import Sequence as Request
from nanovllm.engine.sequence import Status
from nanovllm.engine.text import Message
from nanovllm.errors import CapacityError, ConfigError
from nanovllm.log import get_logger
from nanovllm.metrics.throughput import Throughput
from nanovllm.outputs import RequestOutput, StreamOutput
from nanovllm.prompts import as_prompts
from nanovllm.sampling_params import SamplingParams

logger = get_logger(__name__)

SamplingParamsArg = SamplingParams | Sequence[SamplingParams] | None
# A prompt on its way: its request, or the result of one that was refused.
Entry = Request | RequestOutput
# How each prompt is encoded: a function and its arguments, called when the request is queued.
Items = Sequence[tuple[Callable[..., list[int]], tuple[Any, ...]]]


class LLM:
    """A model, loaded and ready. Closes itself as a context manager.

    Args:
        model: directory of a Hugging Face checkpoint, or `"demo"` for a small model that is
            fetched once.
        options: the fields of `Config` (docs/config.md).

    Raises:
        ConfigError: an option, or the model directory, is not usable.
        CapacityError: the model does not fit.
        BackendUnavailableError: the named `attention_backend` cannot run here.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        self.engine = LLMEngine(Config.from_options(model, options))

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer; None if its directory holds none."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParamsArg = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate an answer to each prompt and return them in the order of the prompts.

        Args:
            prompts: text, or token ids as any sequence of integers; one, or several in a list.
            sampling_params: for all prompts, or a list with one for each.
            use_tqdm: whether to show a progress bar with tokens per second.

        Returns:
            One result a prompt. A prompt that cannot be served (empty, too long, ids outside the
            vocabulary) gives a result with `finish_reason="error"` and the others go on.

        Raises:
            ConfigError: a prompt is neither text nor integers, or the lists differ in length.
        """
        encoder = self.engine.encoder
        items = [(encoder.encode, (prompt,)) for prompt in as_prompts(prompts)]
        return self._run(items, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParamsArg = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Generate the next message of each conversation.

        Args:
            messages: one conversation, a list of `{"role": ..., "content": ...}`; or several.
            sampling_params: for all conversations, or a list with one for each.
            use_tqdm: whether to show a progress bar.
            chat_template: a Jinja template to use instead of the model's own.
            add_generation_prompt: whether the template opens the assistant's turn.

        Returns:
            As `generate`. A conversation that the template refuses gives a result with
            `finish_reason="error"` and the template's reason.
        """
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: Any = [messages] if single else messages
        encode = self.engine.encoder.encode_chat
        items = [(encode, (chat, chat_template, add_generation_prompt)) for chat in conversations]
        return self._run(items, sampling_params, use_tqdm)

    def stream(
        self, prompts: Any, sampling_params: SamplingParamsArg = None
    ) -> Iterator[StreamOutput]:
        """Generate like `generate`, and yield what each step adds to each prompt's answer.

        The pieces of a prompt join to its text, and its last piece carries the whole result. The
        requests are queued when the iteration begins and cancelled if it is given up.

        Raises:
            ConfigError: as `generate`, at once.
        """
        encode = self.engine.encoder.encode
        items = [(encode, (prompt,)) for prompt in as_prompts(prompts)]
        return self._stream(items, _params_list(sampling_params, len(items)))

    def _stream(
        self,
        items: Items,
        params: Sequence[SamplingParams],
    ) -> Iterator[StreamOutput]:
        entries: list[Entry] = []
        try:
            self._submit(entries, items, params, streaming=True)
            num_sent = [0] * len(entries)
            open_indices = list(range(len(entries)))
            while open_indices:
                for index in list(open_indices):
                    piece = _next_piece(index, entries[index], num_sent[index])
                    if piece is None:
                        continue
                    num_sent[index] += len(piece.token_ids)
                    if piece.output is not None:
                        open_indices.remove(index)
                    yield piece
                if any(_is_open(entries[index]) for index in open_indices):
                    self.engine.step()
        finally:
            self._abort(entries)

    def stats(self) -> dict[str, Any]:
        """Return what the KV cache takes and moved since the start or `reset_stats`.

        Waits for the device. Keys:
            transfers: with offload, for each phase (`prefill`, `decode`): `h2d` and `d2h`, to the
                device and back, each with `num_copies`, `key_bytes` and `value_bytes`; and
                `wait_ms`, how long the compute stream waited for copies. On a CPU copies are done
                by the computing thread and are no waits. Empty without offload.
            kv_device_bytes, kv_host_bytes: memory that the KV cache takes now, buffers included.
            attention: what the prefill policy chose; see `TilePolicy.get_density_stats`. Empty for
                FULL, which chooses everything.
            pages: with offload and `decode_policy=QUEST`, how often decode's pages were on the
                device; see `HotPages.stats`. Empty otherwise.
            peak_device_bytes: most memory in use on the device; on a CPU, by the process.
            num_preemptions: how often a request had to compute its tokens again.
        """
        return self.engine.stats()

    def reset_stats(self) -> None:
        """Let copies, waits, choices of the policy and peak memory be counted anew."""
        self.engine.reset_stats()

    def close(self) -> None:
        """Free the model and its KV cache. Only `close` may be called afterwards."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        items: Items,
        sampling_params: SamplingParamsArg,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _params_list(sampling_params, len(items))
        entries: list[Entry] = []
        throughput = Throughput()
        try:
            self._submit(entries, items, params)
            with tqdm(total=len(entries), desc="Generating", disable=not use_tqdm) as bar:
                num_done = 0
                while (num_open := sum(map(_is_open, entries))) > 0:
                    step: Step = self.engine.step()
                    throughput.add(step.num_tokens - len(step.decodes), len(step.decodes))
                    bar.update(len(entries) - num_open - num_done)
                    num_done = len(entries) - num_open
                    bar.set_postfix(throughput.rates(), refresh=False)
                bar.update(len(entries) - num_done)
        finally:
            self._abort(entries)
        return [e.output() if isinstance(e, Request) else e for e in entries]

    def _submit(
        self,
        entries: list[Entry],
        items: Items,
        params: Sequence[SamplingParams],
        streaming: bool = False,
    ) -> None:
        """Queue each prompt and add it to `entries`; one that is refused is its result at once."""
        for index, ((encode, arguments), p) in enumerate(zip(items, params, strict=True)):
            token_ids: list[int] = []
            try:
                token_ids = encode(*arguments)
                entries.append(self.engine.add_request(token_ids, p, streaming))
            except (ConfigError, CapacityError) as error:
                logger.warning("prompt %d refused: %s", index, error)
                entries.append(_refused(len(token_ids), str(error)))

    def _abort(self, entries: list[Entry]) -> None:
        for entry in entries:
            if isinstance(entry, Request):
                self.engine.abort(entry)


def _params_list(params: SamplingParamsArg, num_prompts: int) -> Sequence[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    params = list(params)
    if len(params) != num_prompts:
        raise ConfigError(f"{len(params)} sampling_params for {num_prompts} prompts")
    for p in params:
        if not isinstance(p, SamplingParams):
            raise ConfigError(f"sampling_params hold {p!r}, which is no SamplingParams")
    return params


def _is_open(entry: Entry) -> bool:
    return isinstance(entry, Request) and entry.status is not Status.FINISHED


def _refused(num_prompt_tokens: int, message: str) -> RequestOutput:
    nan = float("nan")
    return RequestOutput(
        text="",
        token_ids=[],
        finish_reason="error",
        stop_reason=None,
        error=message,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=0,
        ttft_ms=nan,
        decode_ms=nan,
        logprobs=None,
    )


def _next_piece(index: int, entry: Entry, num_sent: int) -> StreamOutput | None:
    """Return what is new of a streamed request, or None if nothing is."""
    if not isinstance(entry, Request):
        return StreamOutput(index=index, text="", token_ids=[], output=entry)
    finished = entry.status is Status.FINISHED
    failed = entry.finish_reason == "error"
    token_ids = [] if failed else entry.token_ids[entry.num_prompt_tokens + num_sent :]
    if not token_ids and not finished:
        return None
    text = entry.detokenizer.take() if entry.detokenizer and not failed else ""
    output = entry.output() if finished else None
    return StreamOutput(index=index, text=text, token_ids=token_ids, output=output)
