/* Rows of a matrix by index. One work-item makes a block of 32 columns of one row. */

kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void embed(Matrix matrix, global const int *tokens, uint tokens_at, global float *restrict out)
{
    const uint token = get_global_id(1), columns = matrix[COLUMNS];
    global const int *order = (global const int *)(matrix + matrix[ORDER]);
    global float *row = out + (ulong)token * columns;
    for (uint block = LANE; block < matrix[BLOCKS]; block += LANES) {
        float16 a, b;
        decode_block(matrix, tokens[tokens_at + token], block, &a, &b);
        if (!matrix[ORDER]) {
            write16(a, row, 32 * block, columns);
            if (32 * block + 16 < columns)
                write16(b, row, 32 * block + 16, columns);
        } else {
            float values[32];
            vstore16(a, 0, values);
            vstore16(b, 1, values);
            for (uint i = 0; i < 32 && 32 * block + i < columns; i++)
                row[order[32 * block + i]] = values[i];
        }
    }
}
