from warpi.noise.kinds import NoisyLabels as NoisyLabels
from warpi.noise.noise_file import read_noise_file as read_noise_file, write_noise_file as write_noise_file
