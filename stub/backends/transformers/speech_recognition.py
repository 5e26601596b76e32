"""Transcribes speech: `/v1/audio/transcriptions`. WAV is decoded here, other files by `soundfile` if it is there:
no program may be started for that.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator

import numpy as np
import torch
from loading import Folder
from transformers import AutoModelForCTC, AutoModelForSpeechSeq2Seq, AutoProcessor

from moonpool.openai import BadRequest, Segment, TranscriptionRequest

RATE = 16_000
# The length of a piece that is recognised at once.
PIECE_S = 30
MOST_S = 4 * 3600
WIDTHS = {1: np.uint8, 2: np.int16, 4: np.int32}


class SpeechRecognition:
    def __init__(self, config: dict) -> None:
        self.folder = Folder(config)
        self.processor = AutoProcessor.from_pretrained(self.folder.path, **self.folder.arguments)
        # False for a model that gives a letter to each moment.
        self.writes = True
        try:
            self.model = self.folder.model(AutoModelForSpeechSeq2Seq)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            self.model, self.writes = self.folder.model(AutoModelForCTC), False

    def transcribe(self, request: TranscriptionRequest) -> Iterator[Segment | dict]:
        sound = decoded(request.file)
        yield {"duration": len(sound) / RATE}
        for start in range(0, len(sound), PIECE_S * RATE):
            piece = sound[start : start + PIECE_S * RATE]
            text = self._text(piece, request.language)
            yield Segment(text, start / RATE, (start + len(piece)) / RATE)

    @torch.inference_mode()
    def _text(self, sound: np.ndarray, language: str | None) -> str:
        given = self.processor(sound, sampling_rate=RATE, return_tensors="pt")
        given = {key: value.to(self.folder.device) for key, value in given.items()}
        if not self.writes:
            tokens = self.model(**given).logits.argmax(-1)
            return self.processor.batch_decode(tokens)[0]
        more = {"language": language} if language and getattr(self.model.generation_config, "lang_to_id", None) else {}
        given["input_features"] = given["input_features"].to(self.model.dtype)
        tokens = self.model.generate(**given, **more)
        return self.processor.batch_decode(tokens, skip_special_tokens=True)[0]


def decoded(file: bytes) -> np.ndarray:
    """Return the sound of a file as one channel at `RATE`. Raises `BadRequest`."""
    try:
        sound, rate = in_wav(file) if file[:4] == b"RIFF" else by_library(file)
    except (wave.Error, EOFError, ValueError, RuntimeError) as error:
        raise BadRequest(f"the recording cannot be read: {error}"[:300], "file") from None
    if not 1000 <= rate <= 768_000 or len(sound) > MOST_S * rate:
        raise BadRequest(f"the recording has {len(sound)} values at {rate} a second, which is too much", "file")
    return sound if rate == RATE else resampled(sound, rate)


def in_wav(file: bytes) -> tuple[np.ndarray, int]:
    with wave.open(io.BytesIO(file)) as source:
        width, channels, rate = source.getsampwidth(), source.getnchannels(), source.getframerate()
        if width not in WIDTHS or not 1 <= channels <= 64:
            raise ValueError(f"{channels} channels of {8 * width} bits are not known")
        # No more than the file has, whatever its head claims.
        data = source.readframes(min(source.getnframes(), len(file) // (width * channels)))
    values = np.frombuffer(data[: len(data) // (width * channels) * (width * channels)], WIDTHS[width])
    sound = values.astype(np.float32) / float(1 << (8 * width - 1)) - (1.0 if width == 1 else 0.0)
    return sound.reshape(-1, channels).mean(1), rate


def by_library(file: bytes) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except ImportError:
        raise BadRequest("it is not WAV, and the model's environment lacks the package soundfile", "file") from None
    sound, rate = soundfile.read(io.BytesIO(file), dtype="float32", always_2d=True)
    return sound.mean(1), rate


def resampled(sound: np.ndarray, rate: int) -> np.ndarray:
    """Return the sound at `RATE`, without what that rate cannot have."""
    size = round(len(sound) * RATE / rate)
    if not size:
        return np.zeros(0, np.float32)
    spectrum = np.fft.rfft(sound)
    kept = np.zeros(size // 2 + 1, spectrum.dtype)
    count = min(len(kept), len(spectrum))
    kept[:count] = spectrum[:count]
    return (np.fft.irfft(kept, size) * (size / len(sound))).astype(np.float32)
