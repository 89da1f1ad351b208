/* Rows of bytes between KV planes and canonical blocks, and from slot to slot. A row is one head of
 * one token, `size` bytes; a slot of a plane has `heads` of them. */

static inline void move_bytes(global const uchar *from, global uchar *to, uint size)
{
    uint i = 16 * LANE;
    for (; i + 16 <= size; i += 16 * LANES)
        vstore16(vload16(0, from + i), 0, to + i);
    for (; i < size; i++)
        to[i] = from[i];
}

kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void copy_slots(global uchar *plane, global const int *sources, global const int *targets,
                uint bytes)
{
    const uint i = get_group_id(1);
    move_bytes(plane + (ulong)sources[i] * bytes, plane + (ulong)targets[i] * bytes, bytes);
}

/* Block b of the pages given, head h, token t of the block: to (`reading`) or from the canonical
 * bytes, where the plane's part of a block begins at `part` of its `block_bytes`. */
kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void move_pages(global uchar *plane, global uchar *blocks, global const int *pages, uint reading,
                uint page_size, uint block, uint heads, uint size, ulong block_bytes, ulong part)
{
    const uint b = get_group_id(2), head = get_group_id(1) / block, token = get_group_id(1) % block;
    const uint blocks_a_page = page_size / block;
    const ulong page = pages[b / blocks_a_page];
    const ulong slot = page * page_size + b % blocks_a_page * block + token;
    global uchar *in_plane = plane + (slot * heads + head) * size;
    global uchar *in_block = blocks + b * block_bytes + part + (head * block + token) * size;
    if (reading)
        move_bytes(in_plane, in_block, size);
    else
        move_bytes(in_block, in_plane, size);
}
