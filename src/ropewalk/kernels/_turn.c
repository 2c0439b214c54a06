/* The rotation on a CPU: each pair (a, b) becomes (a cos - b sin, b cos + a sin), in place or elsewhere.
 *
 * Built without torch's headers, so one build serves every torch: Python hands over addresses, shapes and strides.
 * What decides the speed is how often memory is touched, hence
 *  - dimensions are walked in the order of memory, whatever their order in the tensor;
 *  - a block of table rows that stays in the second-level cache serves all heads before the next block is read;
 *  - large tensors are shared among the threads that torch's own OpenMP keeps awake, found at run time.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#if defined(__linux__)
#define HAS_DLFCN 1
#include <dlfcn.h>
#endif
#include "_rows.h"

#define MAX_DIMS 12
#define TABLE_BYTES 65536 /* of cosines and sines, per block: shorter ones interrupt the reading of a head */
#define PIECE 65536       /* channels that are turned in one go, if the dimension that is cut is the outer one */
#define GRAIN 32768       /* elements that are worth a thread of their own */
#define RELEASE 65536     /* elements from which other Python threads may run meanwhile */

enum { INTERLEAVED = 1, BACK = 2, ASK = 4 };
static const int SIZES[DTYPES] = {4, 2, 2, 8};

/* ---- the instructions of this machine ---- */

static const Run *chosen = baseline;
static const char *instructions = "baseline";

static int has_avx2(void) {
#ifdef HAS_AVX2
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}

/* The fastest that the machine has, or plain C. */
static void choose_instructions(int plain) {
    chosen = baseline, instructions = "baseline";
#ifdef HAS_AVX2
    if (!plain && has_avx2()) chosen = avx2, instructions = "avx2";
#endif
}

/* ---- torch's own OpenMP, whichever it is ---- */

static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);

static void find_threads(void) {
#ifdef HAS_DLFCN
    /* The library is loaded already; a search from it finds the runtime that it is linked to, and no other. */
    void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch != NULL) {
        *(void **)&parallel = dlsym(torch, "GOMP_parallel");
        if (parallel == NULL) dlclose(torch);
    }
#endif
}

/* ---- the walk ---- */

typedef struct {
    int dims;
    int64_t n[MAX_DIMS];
    Stride by[MAX_DIMS];
} Walk;

typedef struct {
    Run run;
    Block block; /* of full size */
    Walk outer;
    At start;
    int cut;              /* which dimension of the block is cut into pieces */
    int64_t length, step; /* of that dimension, and of a piece */
    int64_t pieces, items, share, next;
} Job;

static void run_item(const Job *job, int64_t item) {
    Block block = job->block;
    int64_t from = item % job->pieces * job->step, outer = item / job->pieces;
    At at = moved(job->start, block.by[job->cut], from);
    for (int d = job->outer.dims - 1; d >= 0; d--) {
        at = moved(at, job->outer.by[d], outer % job->outer.n[d]);
        outer /= job->outer.n[d];
    }
    block.n[job->cut] = job->length - from < job->step ? job->length - from : job->step;
    job->run(&block, at);
}

static void run_share(void *data) {
    Job *job = data;
#if defined(__GNUC__)
    for (;;) { /* a busy core takes fewer */
        int64_t first = __atomic_fetch_add(&job->next, job->share, __ATOMIC_RELAXED);
        if (first >= job->items) return;
        int64_t last = first + job->share < job->items ? first + job->share : job->items;
        for (int64_t item = first; item < last; item++) run_item(job, item);
    }
#else
    for (int64_t item = 0; item < job->items; item++) run_item(job, item);
#endif
}

/* How far a step along a dimension reaches; what is read again and again has no stride of its own. */
static int64_t reach(Stride by) { return by.x > by.out ? by.x : by.out; }

/* Whether a dimension continues where n steps of the next one end. */
static int is_one_run(Stride up, Stride by, int64_t n) {
    return up.out == n * by.out && up.x == n * by.x && up.cos == n * by.cos && up.sin == n * by.sin;
}

/* Dimensions by falling stride, those of length 1 left out, neighbours that are one run joined. */
static void tidy(Walk *w) {
    Walk sorted = {0};
    for (int d = 0; d < w->dims; d++) {
        if (w->n[d] == 1) continue;
        int place = sorted.dims++;
        for (; place > 0 && reach(sorted.by[place - 1]) < reach(w->by[d]); place--)
            sorted.n[place] = sorted.n[place - 1], sorted.by[place] = sorted.by[place - 1];
        sorted.n[place] = w->n[d], sorted.by[place] = w->by[d];
    }
    w->dims = 0;
    for (int d = 0; d < sorted.dims; d++) {
        int64_t n = sorted.n[d];
        Stride by = sorted.by[d];
        if (w->dims > 0 && is_one_run(w->by[w->dims - 1], by, n)) w->n[w->dims - 1] *= n, w->by[w->dims - 1] = by;
        else w->n[w->dims] = n, w->by[w->dims++] = by;
    }
}

static int64_t at_least_1(int64_t n) { return n > 1 ? n : 1; }

static void cut_into(Job *job, int64_t step) {
    job->step = at_least_1(step);
    job->pieces = (job->length + job->step - 1) / job->step;
    job->items = job->pieces;
    for (int d = 0; d < job->outer.dims; d++) job->items *= job->outer.n[d];
}

/* The two innermost dimensions form a block; the one that a table follows is cut, so that its rows stay at hand. */
static void plan(Job *job, Walk w, int real_size, int64_t threads) {
    tidy(&w);
    for (int i = 1; i >= 0; i--) {
        Stride none = {0};
        job->block.n[i] = w.dims > 0 ? w.n[w.dims - 1] : 1;
        job->block.by[i] = w.dims > 0 ? w.by[--w.dims] : none;
    }
    job->outer = w;
    job->cut = job->block.n[0] == 1 || (job->block.by[0].cos == 0 && job->block.by[1].cos != 0);
    job->length = job->block.n[job->cut];
    cut_into(job, TABLE_BYTES / (2 * real_size * job->block.pairs));
    int64_t few = PIECE / (2 * job->block.pairs * job->block.n[1]);
    if (job->cut == 0 && few < job->step) cut_into(job, few);
    while (job->items < 4 * threads && job->step > 1) cut_into(job, job->step / 2);
}

static void execute(Job *job, int64_t elements, int64_t threads) {
    job->share = job->items;
    PyThreadState *state = elements >= RELEASE ? PyEval_SaveThread() : NULL;
#if defined(__GNUC__)
    if (parallel != NULL && threads > 1 && job->items > 1) {
        job->share = at_least_1(job->items / (8 * threads));
        parallel(run_share, job, (unsigned)threads, 0);
    } else
#endif
        run_share(job);
    if (state != NULL) PyEval_RestoreThread(state);
}

/* ---- from Python ---- */

/* A tuple of integers; its length, or -1. */
static int read_tuple(PyObject *tuple, int64_t *into) {
    Py_ssize_t n = PyTuple_Size(tuple);
    if (n < 0 || n > MAX_DIMS) return -1;
    for (Py_ssize_t i = 0; i < n; i++) into[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    return (int)n;
}

typedef struct { char *data; int64_t shape[MAX_DIMS], stride[MAX_DIMS]; int dims; } View;

/* Address, shape, strides: three arguments; whether they can be walked (or an error is set). */
static int read_view(PyObject *const *args, View *view) {
    view->data = PyLong_AsVoidPtr(args[0]);
    view->dims = read_tuple(args[1], view->shape);
    return view->dims >= 1 && read_tuple(args[2], view->stride) == view->dims && !PyErr_Occurred();
}

static int read_triple(PyObject *triple, View *view) {
    if (PyTuple_Size(triple) != 3) return 0;
    PyObject *parts[3] = {PyTuple_GetItem(triple, 0), PyTuple_GetItem(triple, 1), PyTuple_GetItem(triple, 2)};
    return read_view(parts, view);
}

static int fits_table(const View *table, const View *x, int64_t pairs) {
    int ahead = x->dims - table->dims, last = table->dims - 1;
    if (ahead < 0 || table->shape[last] != pairs || (pairs > 1 && table->stride[last] != 1)) return 0;
    for (int d = 0; d < last; d++)
        if (table->shape[d] != 1 && table->shape[d] != x->shape[d + ahead]) return 0;
    return 1;
}

/* The stride of a table along dimension d of x, 0 where it is shared. */
static int64_t shared_stride(const View *table, int d, int ahead) {
    return d < ahead || table->shape[d - ahead] == 1 ? 0 : table->stride[d - ahead];
}

/* Everything that the walk relies on; what does not hold is another path's work. */
static int supported(const View *out, const View *x, const View *cos, const View *sin, int64_t pairs) {
    int last = x->dims - 1;
    int64_t channels = x->shape[last];
    if (out->dims != x->dims || pairs < 1 || 2 * pairs > channels) return 0;
    if (channels > 1 && (x->stride[last] != 1 || out->stride[last] != 1)) return 0;
    for (int d = 0; d < last; d++)
        if (out->shape[d] != x->shape[d] || (out->stride[d] == 0 && x->shape[d] > 1)) return 0;
    return out->shape[last] == channels && fits_table(cos, x, pairs) && fits_table(sin, x, pairs);
}

/* turn((out, its shape, its strides) or None for x, x, its shape, its strides, cos, ..., sin, ..., dtype, flags,
 * threads, gap): whether it was done, or, with the flag ASK, whether it would be.
 * gap: elements from the first to the second channel of a pair in `out`, half layout; 0 for the usual distance. */
static PyObject *turn(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    View out, x, cos, sin;
    if (n != 14) return PyErr_Format(PyExc_TypeError, "turn takes 14 arguments, got %zd", n);
    int readable = read_view(args + 1, &x) && read_view(args + 4, &cos) && read_view(args + 7, &sin);
    if (args[0] == Py_None) out = x;
    else readable = readable && read_triple(args[0], &out);
    long dtype = PyLong_AsLong(args[10]), flags = PyLong_AsLong(args[11]);
    int64_t threads = PyLong_AsLongLong(args[12]), gap = PyLong_AsLongLong(args[13]);
    if (PyErr_Occurred()) return NULL;
    int64_t pairs = readable ? cos.shape[cos.dims - 1] : 0, elements = 1;
    if (!readable || dtype < 0 || dtype >= DTYPES || !supported(&out, &x, &cos, &sin, pairs)) Py_RETURN_FALSE;
    if (flags & ASK) Py_RETURN_TRUE;

    int size = SIZES[dtype], real_size = dtype == FLOAT64 ? 8 : 4;
    Walk walk = {.dims = x.dims - 1};
    for (int d = 0; d < walk.dims; d++) {
        walk.n[d] = x.shape[d];
        walk.by[d].out = out.stride[d] * size, walk.by[d].x = x.stride[d] * size;
        walk.by[d].cos = shared_stride(&cos, d, x.dims - cos.dims) * real_size;
        walk.by[d].sin = shared_stride(&sin, d, x.dims - sin.dims) * real_size;
        elements *= x.shape[d];
    }
    if (elements == 0) Py_RETURN_TRUE;
    elements *= x.shape[x.dims - 1];
    Job job = {.run = chosen[dtype], .start = {out.data, x.data, cos.data, sin.data}};
    job.block.pairs = pairs, job.block.gap = gap ? gap : pairs;
    job.block.rest = out.data == x.data ? 0 : (x.shape[x.dims - 1] - 2 * pairs) * size;
    job.block.interleaved = (flags & INTERLEAVED) != 0, job.block.back = (flags & BACK) != 0;
    if (threads > elements / GRAIN) threads = elements / GRAIN;
    plan(&job, walk, real_size, threads > 1 ? threads : 0);
    execute(&job, elements, threads);
    Py_RETURN_TRUE;
}

/* What was found on this machine. */
static PyObject *found(PyObject *self, PyObject *unused) {
    return Py_BuildValue("(sO)", instructions, parallel != NULL ? Py_True : Py_False);
}

/* For tests of the code that other machines run. */
static PyObject *use_plain(PyObject *self, PyObject *plain) {
    int is_plain = PyObject_IsTrue(plain);
    if (is_plain < 0) return NULL;
    choose_instructions(is_plain);
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"turn", (PyCFunction)(void (*)(void))turn, METH_FASTCALL, "The rotation, by addresses, shapes and strides."},
    {"use_plain", use_plain, METH_O, "Whether to run plain C even where the machine has better."},
    {"found", found, METH_NOARGS, "(instructions, whether torch's threads were found)"},
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *module) {
    choose_instructions(0);
    find_threads();
    return 0;
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, (void *)start},
    {0, NULL},
};
static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "_turn", .m_doc = "The rotation on a CPU.",
    .m_methods = METHODS, .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__turn(void) { return PyModuleDef_Init(&MODULE); }
