# Compiled from kvstore/native/hash_chain.c; absent where there was no C compiler when kvstore was built.
from typing_extensions import Buffer

def hash_chain(key: Buffer, parent: Buffer, data: Buffer, block_bytes: int) -> bytes: ...
