"""Label noise: its kinds, how it is written, and files of noisy labels."""

from warpi.utils.lazy import lazy_names

__getattr__ = lazy_names(
    "warpi.noise",
    {"warpi.noise.kinds": ("NoisyLabels",), "warpi.noise.noise_file": ("read_noise_file", "write_noise_file")},
)
