/* Copies and updates rows of tables: the loops of `zstrat.native`.

   Rows that a step names are spread over a table that is larger than any cache. numpy
   copies them one after the other, and each copy waits for memory. Here, rows are
   prefetched while those before them are processed.

   `update` runs a program of float32 operations, element by element, on the rows of
   several tables: a block of rows at a time, small enough for the first-level cache.
   Operations are rounded one by one (no fused multiply-add), so all machines compute the
   same. Denormal numbers are zero, as in XLA.

   Nothing is written before all indices were checked. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Indices are numpy's intp: where that is shorter, numpy and XLA do without the loops. */
#if INTPTR_MAX != INT64_MAX
#error "the loops are for machines of 64 bits"
#endif

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

/* One more copy of the loops for AVX2, chosen when the module is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

#define FLOAT ((Py_ssize_t)sizeof(float))
#define INDEX ((Py_ssize_t)sizeof(int64_t))

enum {
    LINE = 64,
    AHEAD = 4096,      /* bytes of rows that are prefetched */
    BLOCK = 512,       /* elements of a register */
    REGISTERS = 48,
    TABLES = 16,
    RELEASE = 1 << 16, /* bytes from which on other threads of Python run */
};

enum operation {
    NEG, ABS, SIGN, SQRT, RSQRT,
    ADD, SUB, MUL, DIV, MAX, MIN,
    EQ, NE, LT, LE, GT, GE, AND, OR, NOT,
    SELECT, OPERATIONS
};

/* Operation, result, up to three operands: numbers of registers. */
enum { FIELDS = 5 };

typedef struct {
    char *data;
    Py_ssize_t rows;
} Table;

/* Treats denormal numbers as zero, as XLA does; returns the former mode. */
static uint64_t flush_denormals(void)
{
    uint64_t former = 0;
#if defined(__x86_64__)
    former = _mm_getcsr();
    _mm_setcsr((unsigned int)former | 0x8040);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(former));
    /* "memory": no load or store of the loops moves across. */
    __asm__ volatile("msr fpcr, %0" : : "r"(former | 1u << 24) : "memory");
#endif
    return former;
}

static void restore_mode(uint64_t former)
{
#if defined(__x86_64__)
    _mm_setcsr((unsigned int)former);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(former) : "memory");
#else
    (void)former;
#endif
}

/* Indices and gradients may begin anywhere in a message. */
static int64_t index_at(const char *indices, Py_ssize_t i)
{
    int64_t index;
    memcpy(&index, indices + i * INDEX, sizeof index);
    return index;
}

/* Of long rows the first lines: the processor foresees the others. */
#define PREFETCH(table, row, width, is_write)                                          \
    do {                                                                               \
        const char *at = (table)->data + (row) * (width);                              \
        Py_ssize_t end = (width) < 8 * LINE ? (width) : 8 * LINE;                      \
        for (Py_ssize_t line = 0; line < end; line += LINE)                            \
            __builtin_prefetch(at + line, is_write, 3);                                \
        __builtin_prefetch(at + end - 1, is_write, 3);                                 \
    } while (0)

static void copy_row(char *to, const char *from, Py_ssize_t width)
{
    /* Known lengths are a few moves, in place of a call. */
    switch (width) {
    case 4: memcpy(to, from, 4); break;
    case 8: memcpy(to, from, 8); break;
    case 16: memcpy(to, from, 16); break;
    case 32: memcpy(to, from, 32); break;
    case 64: memcpy(to, from, 64); break;
    case 128: memcpy(to, from, 128); break;
    default: memcpy(to, from, (size_t)width);
    }
}

/* How many rows are prefetched. */
static Py_ssize_t distance(Py_ssize_t width)
{
    Py_ssize_t ahead = AHEAD / (width ? width : 1);
    return ahead < 2 ? 2 : ahead > 32 ? 32 : ahead;
}

static void take(const Table *table, const char *indices, Py_ssize_t count, Py_ssize_t width,
                 char *out)
{
    Py_ssize_t ahead = distance(width);
    for (Py_ssize_t i = 0; i < ahead && i < count; i++)
        PREFETCH(table, index_at(indices, i), width, 0);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + ahead < count)
            PREFETCH(table, index_at(indices, i + ahead), width, 0);
        copy_row(out + i * width, table->data + index_at(indices, i) * width, width);
    }
}

static void put(const Table *table, const char *indices, Py_ssize_t count, Py_ssize_t width,
                const char *rows)
{
    Py_ssize_t ahead = distance(width);
    for (Py_ssize_t i = 0; i < ahead && i < count; i++)
        PREFETCH(table, index_at(indices, i), width, 1);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + ahead < count)
            PREFETCH(table, index_at(indices, i + ahead), width, 1);
        copy_row(table->data + index_at(indices, i) * width, rows + i * width, width);
    }
}

#define EACH(expression)                                                                \
    for (Py_ssize_t i = 0; i < n; i++)                                                  \
        r[i] = (expression);                                                            \
    break

WIDE static void run(int operation, Py_ssize_t n, float *restrict r, const float *a,
                     const float *b, const float *c)
{
    switch (operation) {
    case NEG: EACH(-a[i]);
    case ABS: EACH(fabsf(a[i]));
    case SIGN: EACH(a[i] > 0 ? 1.0f : a[i] < 0 ? -1.0f : a[i]);
    case SQRT: EACH(sqrtf(a[i]));
    case RSQRT: EACH(1.0f / sqrtf(a[i]));
    case ADD: EACH(a[i] + b[i]);
    case SUB: EACH(a[i] - b[i]);
    case MUL: EACH(a[i] * b[i]);
    case DIV: EACH(a[i] / b[i]);
    /* NaN if one of them is NaN. */
    case MAX: EACH(a[i] > b[i] || a[i] != a[i] ? a[i] : b[i]);
    case MIN: EACH(a[i] < b[i] || a[i] != a[i] ? a[i] : b[i]);
    /* Truth is 1 or 0. */
    case EQ: EACH(a[i] == b[i] ? 1.0f : 0.0f);
    case NE: EACH(a[i] != b[i] ? 1.0f : 0.0f);
    case LT: EACH(a[i] < b[i] ? 1.0f : 0.0f);
    case LE: EACH(a[i] <= b[i] ? 1.0f : 0.0f);
    case GT: EACH(a[i] > b[i] ? 1.0f : 0.0f);
    case GE: EACH(a[i] >= b[i] ? 1.0f : 0.0f);
    case AND: EACH(a[i] * b[i]);
    case OR: EACH(a[i] + b[i] > 0 ? 1.0f : 0.0f);
    case NOT: EACH(1.0f - a[i]);
    case SELECT: EACH(a[i] != 0 ? c[i] : b[i]);
    }
}

#undef EACH

typedef struct {
    const int32_t *code;
    Py_ssize_t steps;
    const int32_t *results;
    Py_ssize_t tables;
    const float *constants;
    Py_ssize_t given;
} Program;

/* The update of some columns of some rows: a block. */
static void update_block(const Program *program, char *const *tables, const char *indices,
                         Py_ssize_t rows, Py_ssize_t width, const char *gradients,
                         Py_ssize_t piece, float (*registers)[BLOCK])
{
    Py_ssize_t columns = piece / FLOAT;
    for (Py_ssize_t t = 0; t < program->tables; t++)
        for (Py_ssize_t i = 0; i < rows; i++)
            copy_row((char *)(registers[t] + i * columns),
                     tables[t] + index_at(indices, i) * width, piece);
    for (Py_ssize_t i = 0; i < rows; i++)
        copy_row((char *)(registers[program->tables] + i * columns), gradients + i * width, piece);
    for (Py_ssize_t step = 0; step < program->steps; step++) {
        const int32_t *at = program->code + step * FIELDS;
        run(at[0], rows * columns, registers[at[1]], registers[at[2]], registers[at[3]],
            registers[at[4]]);
    }
    for (Py_ssize_t t = 0; t < program->tables; t++)
        for (Py_ssize_t i = 0; i < rows; i++)
            copy_row(tables[t] + index_at(indices, i) * width,
                     (char *)(registers[program->results[t]] + i * columns), piece);
}

static void update(const Program *program, const Table *tables, const char *indices,
                   Py_ssize_t count, Py_ssize_t length, const char *gradients)
{
    _Alignas(LINE) float registers[REGISTERS][BLOCK];
    char *at[TABLES];
    Py_ssize_t width = length * FLOAT;
    Py_ssize_t columns = length < BLOCK ? length : BLOCK;
    Py_ssize_t most = BLOCK / columns;
    for (Py_ssize_t i = 0; i < program->given; i++)
        for (int j = 0; j < BLOCK; j++)
            registers[program->tables + 1 + i][j] = program->constants[i];
    for (Py_ssize_t start = 0, ahead = 0; start < count; start += most) {
        Py_ssize_t rows = count - start < most ? count - start : most;
        /* Those of this block and of the next one. */
        for (; ahead < start + 2 * most && ahead < count; ahead++)
            for (Py_ssize_t t = 0; t < program->tables; t++)
                PREFETCH(&tables[t], index_at(indices, ahead), width, 1);
        /* Once, but for rows that are longer than a block. */
        for (Py_ssize_t column = 0; column < length; column += columns) {
            Py_ssize_t some = length - column < columns ? length - column : columns;
            for (Py_ssize_t t = 0; t < program->tables; t++)
                at[t] = tables[t].data + column * FLOAT;
            update_block(program, at, indices + start * INDEX, rows, width,
                         gradients + start * width + column * FLOAT, some * FLOAT, registers);
        }
    }
}

/* What follows talks to Python. */

typedef struct {
    Py_buffer buffers[TABLES + 6];
    int count;
} Views;

static void *view(Views *views, PyObject *object, int flags, Py_ssize_t alignment, Py_ssize_t *size)
{
    Py_buffer *buffer = &views->buffers[views->count];
    if (PyObject_GetBuffer(object, buffer, flags) < 0)
        return NULL;
    views->count++;
    if ((uintptr_t)buffer->buf % (size_t)alignment) {
        PyErr_SetString(PyExc_ValueError, "an array is not aligned");
        return NULL;
    }
    *size = buffer->len;
    return buffer->buf;
}

static void release(Views *views)
{
    while (views->count)
        PyBuffer_Release(&views->buffers[--views->count]);
}

static const char *indices_of(Views *views, PyObject *object, Py_ssize_t *count)
{
    Py_ssize_t size;
    const char *indices = view(views, object, PyBUF_SIMPLE, 1, &size);
    *count = size / INDEX;
    return indices;
}

static int require_inside(const char *indices, Py_ssize_t count, Py_ssize_t rows)
{
    uint64_t most = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        most = (uint64_t)index_at(indices, i) > most ? (uint64_t)index_at(indices, i) : most;
    if (count && most >= (uint64_t)rows) {
        PyErr_Format(PyExc_IndexError, "index %lld is outside of a table of %zd rows",
                     (long long)most, rows);
        return -1;
    }
    return 0;
}

/* (table, indices, rows): rows of the table to rows, or the other way. The elements of
   the table are its rows. */
static PyObject *move(PyObject *arguments, int is_put)
{
    PyObject *objects[3];
    Views views = {.count = 0};
    Py_ssize_t size, count, length;
    int ok = 0;
    if (!PyArg_ParseTuple(arguments, "OOO", &objects[0], &objects[1], &objects[2]))
        return NULL;
    char *data = view(&views, objects[0], is_put ? PyBUF_WRITABLE : PyBUF_SIMPLE, 1, &size);
    const char *indices = data ? indices_of(&views, objects[1], &count) : NULL;
    char *rows = NULL;
    if (indices)
        rows = view(&views, objects[2], is_put ? PyBUF_SIMPLE : PyBUF_WRITABLE, 1, &length);
    if (!rows)
        goto done;
    Py_ssize_t width = views.buffers[0].itemsize;
    Table table = {data, width ? size / width : 0};
    if (width * count != length) {
        PyErr_SetString(PyExc_ValueError, "table, indices and rows do not fit each other");
        goto done;
    }
    if (require_inside(indices, count, table.rows) < 0)
        goto done;
    ok = 1;
    PyThreadState *state = length >= RELEASE ? PyEval_SaveThread() : NULL;
    if (is_put)
        put(&table, indices, count, width, rows);
    else
        take(&table, indices, count, width, rows);
    if (state)
        PyEval_RestoreThread(state);
done:
    release(&views);
    return ok ? Py_NewRef(Py_None) : NULL;
}

static PyObject *native_take(PyObject *module, PyObject *arguments)
{
    (void)module;
    return move(arguments, 0);
}

static PyObject *native_put(PyObject *module, PyObject *arguments)
{
    (void)module;
    return move(arguments, 1);
}

static int is_valid(const Program *program, Py_ssize_t length)
{
    Py_ssize_t known = program->tables + 1 + program->given;
    if (known + program->steps > REGISTERS || length < 0)
        return 0;
    for (Py_ssize_t step = 0; step < program->steps; step++) {
        const int32_t *at = program->code + step * FIELDS;
        /* Each result has a register of its own, after all that it is made of. */
        if (at[0] < 0 || at[0] >= OPERATIONS || at[1] != known + step)
            return 0;
        for (int i = 2; i < FIELDS; i++)
            if (at[i] < 0 || at[i] >= at[1])
                return 0;
    }
    for (Py_ssize_t t = 0; t < program->tables; t++)
        if (program->results[t] < 0 || program->results[t] >= known + program->steps)
            return 0;
    return 1;
}

static PyObject *native_update(PyObject *module, PyObject *arguments)
{
    PyObject *code, *results, *constants, *arrays, *at, *gradients;
    Views views = {.count = 0};
    Table tables[TABLES];
    Program program;
    Py_ssize_t size, count, length;
    int ok = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOOO!OO", &code, &results, &constants, &PyTuple_Type, &arrays,
                          &at, &gradients))
        return NULL;
    program.tables = PyTuple_Size(arrays);
    if (program.tables < 1 || program.tables > TABLES) {
        PyErr_SetString(PyExc_ValueError, "too many tables, or none");
        return NULL;
    }
    if (!(program.code = view(&views, code, PyBUF_SIMPLE, sizeof(int32_t), &size)))
        goto done;
    program.steps = size / (FIELDS * (Py_ssize_t)sizeof(int32_t));
    if (!(program.results = view(&views, results, PyBUF_SIMPLE, sizeof(int32_t), &size)))
        goto done;
    int fits = size == program.tables * (Py_ssize_t)sizeof(int32_t);
    if (!(program.constants = view(&views, constants, PyBUF_SIMPLE, sizeof(float), &size)))
        goto done;
    program.given = size / FLOAT;
    const char *indices = indices_of(&views, at, &count);
    if (!indices)
        goto done;
    const char *gradient = view(&views, gradients, PyBUF_SIMPLE, 1, &size);
    if (!gradient)
        goto done;
    length = count ? size / count / FLOAT : 0;
    fits = fits && length * count * FLOAT == size && is_valid(&program, length);
    for (Py_ssize_t t = 0; t < program.tables; t++) {
        Py_ssize_t width = length * FLOAT;
        tables[t].data = view(&views, PyTuple_GetItem(arrays, t), PyBUF_WRITABLE, 1, &size);
        if (!tables[t].data)
            goto done;
        tables[t].rows = width ? size / width : 0;
        fits = fits && tables[t].rows * width == (width ? size : 0);
        if (fits && width && require_inside(indices, count, tables[t].rows) < 0)
            goto done;
    }
    if (!fits) {
        PyErr_SetString(PyExc_ValueError,
                        "program, tables, indices and gradients do not fit each other");
        goto done;
    }
    ok = 1;
    if (length) {
        int is_long = program.tables * count * length * FLOAT >= RELEASE;
        PyThreadState *state = is_long ? PyEval_SaveThread() : NULL;
        uint64_t former = flush_denormals();
        update(&program, tables, indices, count, length, gradient);
        restore_mode(former);
        if (state)
            PyEval_RestoreThread(state);
    }
done:
    release(&views);
    return ok ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {
    {"take", native_take, METH_VARARGS,
     "take(table, indices, rows): copies rows of a table to rows."},
    {"put", native_put, METH_VARARGS, "put(table, indices, rows): copies rows to a table."},
    {"update", native_update, METH_VARARGS,
     "update(code, results, constants, tables, indices, gradients): updates rows of tables."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "zstrat.native._loops", .m_size = 0, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__loops(void)
{
    return PyModule_Create(&definition);
}
