/* Rows and columns taken by index. */

/* out[row] = x[rows[row]], contiguous. With `rows_at` -1 the rows are those of x in order. */
kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void take_rows(global const float *restrict x, uint x_at, uint x_stride, global const int *rows,
               int rows_at, uint columns, global float *restrict out)
{
    const uint row = get_global_id(1);
    const uint source = rows_at < 0 ? row : rows[rows_at + row];
    global const float *from = x + x_at + (ulong)source * x_stride;
    for (uint column = 16 * LANE; column < columns; column += 16 * LANES)
        write16(read16(from, column, columns), out + (ulong)row * columns, column, columns);
}

/* out[row][j] = x[row][order[j]]: order is a section of the matrix. */
kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void take_columns(global const float *restrict x, uint x_at, uint x_stride, Matrix matrix,
                  global float *restrict out)
{
    const uint row = get_global_id(1), columns = matrix[COLUMNS];
    global const int *order = (global const int *)(matrix + matrix[ORDER]);
    for (uint column = LANE; column < columns; column += LANES)
        out[(ulong)row * columns + column] = x[x_at + (ulong)row * x_stride + order[column]];
}

/* The step's input tokens: those the host knows, and those that the step before sampled. */
kernel __attribute__((reqd_work_group_size(LANES, 1, 1)))
void fill_tokens(global int *batch, uint tokens_at, uint sources_at, uint count,
                 global const int *previous)
{
    for (uint i = LANE; i < count; i += LANES) {
        int source = batch[sources_at + i];
        if (source >= 0)
            batch[tokens_at + i] = previous[source];
    }
}
