"""Unix ``compress``, for files of the old format that nothing at hand writes."""


def compress(content, max_width=16, clears=True):
    """Pack bytes as ``compress -b max_width`` does; without `clears` as its oldest versions did."""
    first = {bytes([byte]): byte for byte in range(256)}
    table, free, width, last = dict(first), 256 + clears, 9, b""
    packed, group = bytearray([0x1F, 0x9D, max_width | 128 * clears]), []

    def close(size):
        packed.extend(sum(code << width * i for i, code in enumerate(group)).to_bytes(size, "little"))
        group.clear()

    for byte in content:
        string = last + bytes([byte])
        if string in table:
            last = string
            continue
        group.append(table[last])
        if len(group) == 8:
            close(width)
        if free == 1 << width and width < max_width:
            if group:
                close(width)
            width += 1
        if free < 1 << max_width:
            table[string] = free
            free += 1
        elif clears:
            group.append(256)
            close(width)
            table, free, width = dict(first), 257, 9
        last = bytes([byte])
    if last:
        group.append(table[last])
    close(-(-len(group) * width // 8))
    return bytes(packed)
