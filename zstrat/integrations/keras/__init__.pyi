from .embeddings import Embedding as Embedding
from .saving import ServerCheckpoint as ServerCheckpoint
