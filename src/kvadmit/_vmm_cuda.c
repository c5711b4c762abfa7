/* CUDA virtual memory for one rank: the driver calls of a batch of extents in one C call.
 *
 * Owns: the driver library (loaded at run time, no CUDA headers or toolkit), one reservation,
 * the handle and the progress of every run of bytes in it, and DLPack views of the whole range.
 * Must not know: which extents are in which state for whom; `vmm_cuda.py` does.
 *
 * Stable ABI of CPython 3.11. The GIL is released around every driver call, and no Python object
 * is touched meanwhile. Names, numbers and layouts of the driver's interface are those of
 * NVIDIA's "CUDA Driver API" manual; those of DLPack are from dmlc/dlpack, version 0.8.
 *
 * An extent is one run of bytes per strip. A run has its own handle, because cuMemMap maps a
 * handle from its start only.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* --- the driver's interface ------------------------------------------------------------- */

typedef int Result;
typedef int Device;
typedef unsigned long long Pointer;
typedef unsigned long long Handle;
typedef void *Context;
typedef void *Stream;

enum {
    SUCCESS = 0,
    ERROR_NOT_INITIALIZED = 3,
    ALLOCATION_PINNED = 1,
    LOCATION_DEVICE = 1,
    ACCESS_READ_WRITE = 3,
    GRANULARITY_MINIMUM = 0,
    ATTRIBUTE_VMM_SUPPORTED = 102,
    ATTRIBUTE_MPS_ENABLED = 133,
};

typedef struct {
    int type;
    int id;
} Location;

typedef struct {
    int type;
    int exported_as;
    Location location;
    void *windows_only;
    struct {
        unsigned char compression;
        unsigned char rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} AllocationProperties;

typedef struct {
    Location location;
    int flags;
} AccessDescription;

/* name here, symbol in the library, parameters */
#define DRIVER_CALLS(CALL)                                                                       \
    CALL(init, cuInit, (unsigned))                                                               \
    CALL(version, cuDriverGetVersion, (int *))                                                   \
    CALL(error_name, cuGetErrorName, (Result, const char **))                                    \
    CALL(error_text, cuGetErrorString, (Result, const char **))                                  \
    CALL(device_count, cuDeviceGetCount, (int *))                                                \
    CALL(device_get, cuDeviceGet, (Device *, int))                                               \
    CALL(device_name, cuDeviceGetName, (char *, int, Device))                                    \
    CALL(device_uuid, cuDeviceGetUuid_v2, (unsigned char *, Device))                             \
    CALL(device_bytes, cuDeviceTotalMem_v2, (size_t *, Device))                                  \
    CALL(device_attribute, cuDeviceGetAttribute, (int *, int, Device))                           \
    CALL(context_retain, cuDevicePrimaryCtxRetain, (Context *, Device))                          \
    CALL(context_release, cuDevicePrimaryCtxRelease_v2, (Device))                                \
    CALL(context_push, cuCtxPushCurrent_v2, (Context))                                           \
    CALL(context_pop, cuCtxPopCurrent_v2, (Context *))                                           \
    CALL(context_wait, cuCtxSynchronize, (void))                                                 \
    CALL(memory_info, cuMemGetInfo_v2, (size_t *, size_t *))                                     \
    CALL(granularity, cuMemGetAllocationGranularity,                                             \
         (size_t *, const AllocationProperties *, int))                                          \
    CALL(reserve, cuMemAddressReserve, (Pointer *, size_t, size_t, Pointer, unsigned long long)) \
    CALL(unreserve, cuMemAddressFree, (Pointer, size_t))                                         \
    CALL(create, cuMemCreate,                                                                    \
         (Handle *, size_t, const AllocationProperties *, unsigned long long))                   \
    CALL(release, cuMemRelease, (Handle))                                                        \
    CALL(map, cuMemMap, (Pointer, size_t, size_t, Handle, unsigned long long))                   \
    CALL(unmap, cuMemUnmap, (Pointer, size_t))                                                   \
    CALL(set_access, cuMemSetAccess, (Pointer, size_t, const AccessDescription *, size_t))       \
    CALL(zero, cuMemsetD8Async, (Pointer, unsigned char, size_t, Stream))

typedef struct {
#define MEMBER(name, symbol, parameters) Result(*name) parameters;
    DRIVER_CALLS(MEMBER)
#undef MEMBER
} Calls;

/* One per library that was opened, and never freed: deleters of tensors may run at any time. */
typedef struct Library {
    struct Library *next;
    char *path;
    Calls calls;
} Library;

static Library *libraries; /* guarded by the GIL */

static PyObject *failed; /* _vmm_cuda.Failed(call, number, name, text) */

static PyObject *
raise_failed(const Calls *calls, const char *call, Result number)
{
    const char *name = NULL, *text = NULL;
    calls->error_name(number, &name);
    calls->error_text(number, &text);
    PyObject *arguments =
        Py_BuildValue("(siss)", call, number, name ? name : "unknown", text ? text : "");
    if (arguments != NULL) {
        PyErr_SetObject(failed, arguments);
        Py_DECREF(arguments);
    }
    return NULL;
}

/* --- an address range ------------------------------------------------------------------- */

/* Shared by its space and by every tensor over it; the last one gives the addresses back. */
typedef struct {
    atomic_int owners;
    const Calls *calls;
    Pointer base;
    size_t bytes;
} Reservation;

static void
drop_reservation(Reservation *reservation)
{
    if (atomic_fetch_sub(&reservation->owners, 1) == 1) {
        reservation->calls->unreserve(reservation->base, reservation->bytes);
        free(reservation);
    }
}

/* --- DLPack ----------------------------------------------------------------------------- */

enum { DLPACK_CUDA = 2, DLPACK_INT = 0 };

typedef struct {
    int32_t kind;
    int32_t id;
} TensorDevice;

typedef struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} TensorType;

typedef struct {
    void *data;
    TensorDevice device;
    int32_t dimensions;
    TensorType type;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} Tensor;

typedef struct ManagedTensor {
    Tensor tensor;
    void *manager;
    void (*deleter)(struct ManagedTensor *);
} ManagedTensor;

typedef struct {
    ManagedTensor managed;
    int64_t shape;
    Reservation *reservation;
} View;

/* Plain C: whoever drops the last reference may hold the GIL or not, on any thread. */
static void
delete_view(ManagedTensor *managed)
{
    View *view = managed->manager;
    drop_reservation(view->reservation);
    free(view);
}

static void
delete_unused_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        ManagedTensor *managed = PyCapsule_GetPointer(capsule, "dltensor");
        managed->deleter(managed);
    }
}

/* --- a space ---------------------------------------------------------------------------- */

/* How far a run has come. Each call moves it one state up or down. */
enum { RUN_ABSENT, RUN_CREATED, RUN_MAPPED, RUN_OPEN };

enum { STEP_NONE, STEP_CREATE, STEP_MAP, STEP_ACCESS, STEP_UNMAP, STEP_RELEASE };

static const char *const step_names[] = {"", "create", "map", "access", "unmap", "release"};
static const char *const step_calls[] = {"",
                                         "cuMemCreate",
                                         "cuMemMap",
                                         "cuMemSetAccess",
                                         "cuMemUnmap",
                                         "cuMemRelease"};

typedef struct {
    Handle handle;
    uint8_t state;
} Run;

typedef struct {
    size_t base;  /* of the strip, in bytes from the start of the buffer */
    size_t bytes; /* of a run */
} Strip;

typedef struct {
    PyObject_HEAD
    const Calls *calls;
    Reservation *reservation; /* NULL: closed */
    Context context;
    Device device;
    int ordinal;
    size_t buffer_bytes; /* of the reservation, which ends on a granule */
    Py_ssize_t extents;
    Py_ssize_t strips;
    Strip *strip;
    Run *run; /* [extent][strip] */
    atomic_flag busy;
} Space;

/* What a batch reached: `done` extents in the order given, then one that failed at `step`. */
typedef struct {
    Py_ssize_t done;
    int step;
    const char *call;
    Result number;
} Reached;

static Run *
run_of(Space *space, Py_ssize_t extent, Py_ssize_t strip)
{
    return &space->run[extent * space->strips + strip];
}

static Pointer
address_of(Space *space, Py_ssize_t extent, Py_ssize_t strip)
{
    const Strip *where = &space->strip[strip];
    return space->reservation->base + where->base + (size_t)extent * where->bytes;
}

static AllocationProperties
properties_of(Device device)
{
    AllocationProperties properties;
    memset(&properties, 0, sizeof properties);
    properties.type = ALLOCATION_PINNED;
    properties.location.type = LOCATION_DEVICE;
    properties.location.id = device;
    return properties;
}

static Reached
stopped_at(Py_ssize_t done, int step, Result number)
{
    return (Reached){done, step, step_calls[step], number};
}

static Result
create_run(Space *space, Py_ssize_t extent, Py_ssize_t strip)
{
    Run *run = run_of(space, extent, strip);
    if (run->state == RUN_CREATED)
        return SUCCESS; /* left by an undo that failed */
    AllocationProperties properties = properties_of(space->device);
    Result result =
        space->calls->create(&run->handle, space->strip[strip].bytes, &properties, 0);
    if (result == SUCCESS)
        run->state = RUN_CREATED;
    return result;
}

static Result
release_run(Space *space, Run *run)
{
    Result result = space->calls->release(run->handle);
    if (result == SUCCESS)
        run->state = RUN_ABSENT;
    return result;
}

/* All handles of all extents, or none: what was made is released in reverse. */
static Reached
create_batch(Space *space, const Py_ssize_t *extents, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        for (Py_ssize_t strip = 0; strip < space->strips; strip++) {
            Result result = create_run(space, extents[i], strip);
            if (result == SUCCESS)
                continue;
            for (Py_ssize_t at = i * space->strips + strip - 1; at >= 0; at--)
                release_run(space, run_of(space, extents[at / space->strips], at % space->strips));
            return stopped_at(0, STEP_CREATE, result);
        }
    }
    return stopped_at(count, STEP_NONE, SUCCESS);
}

static Reached
open_extent(Space *space, Py_ssize_t extent)
{
    const AccessDescription access = {{LOCATION_DEVICE, space->device}, ACCESS_READ_WRITE};
    const Calls *calls = space->calls;
    for (Py_ssize_t strip = 0; strip < space->strips; strip++) {
        Run *run = run_of(space, extent, strip);
        Pointer at = address_of(space, extent, strip);
        size_t bytes = space->strip[strip].bytes;
        Result result;
        if (run->state == RUN_ABSENT && (result = create_run(space, extent, strip)))
            return stopped_at(0, STEP_CREATE, result); /* an abort stopped half way through it */
        if (run->state == RUN_CREATED) {
            if ((result = calls->map(at, bytes, 0, run->handle, 0)))
                return stopped_at(0, STEP_MAP, result);
            run->state = RUN_MAPPED;
        }
        if (run->state == RUN_MAPPED) {
            if ((result = calls->set_access(at, bytes, &access, 1)))
                return stopped_at(0, STEP_ACCESS, result);
            run->state = RUN_OPEN;
        }
    }
    return stopped_at(1, STEP_NONE, SUCCESS);
}

/* Map and open, extent by extent. Undoes nothing. */
static Reached
commit_batch(Space *space, const Py_ssize_t *extents, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        Reached reached = open_extent(space, extents[i]);
        if (reached.step != STEP_NONE) {
            reached.done = i;
            return reached;
        }
    }
    return stopped_at(count, STEP_NONE, SUCCESS);
}

static Reached
abort_batch(Space *space, const Py_ssize_t *extents, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        for (Py_ssize_t strip = 0; strip < space->strips; strip++) {
            Run *run = run_of(space, extents[i], strip);
            Result result;
            if (run->state == RUN_CREATED && (result = release_run(space, run)))
                return stopped_at(i, STEP_RELEASE, result);
        }
    }
    return stopped_at(count, STEP_NONE, SUCCESS);
}

static Reached
decommit_batch(Space *space, const Py_ssize_t *extents, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        for (Py_ssize_t strip = 0; strip < space->strips; strip++) {
            Run *run = run_of(space, extents[i], strip);
            Result result;
            if (run->state > RUN_CREATED) {
                Pointer at = address_of(space, extents[i], strip);
                if ((result = space->calls->unmap(at, space->strip[strip].bytes)))
                    return stopped_at(i, STEP_UNMAP, result);
                run->state = RUN_CREATED;
            }
            if (run->state == RUN_CREATED && (result = release_run(space, run)))
                return stopped_at(i, STEP_RELEASE, result);
        }
    }
    return stopped_at(count, STEP_NONE, SUCCESS);
}

/* --- calls from Python ------------------------------------------------------------------ */

/* Begin what belongs to one thread at a time. */
static int
enter(Space *space)
{
    if (atomic_flag_test_and_set(&space->busy)) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is in a call of this space");
        return -1;
    }
    if (space->reservation == NULL) {
        atomic_flag_clear(&space->busy);
        PyErr_SetString(PyExc_ValueError, "the space is closed");
        return -1;
    }
    return 0;
}

static void
leave(Space *space)
{
    atomic_flag_clear(&space->busy);
}

/* Return the extent numbers of a sequence; NULL with an exception set. */
static Py_ssize_t *
parse_extents(Space *space, PyObject *sequence, Py_ssize_t *count)
{
    *count = PySequence_Size(sequence);
    if (*count < 0)
        return NULL;
    Py_ssize_t *extents = malloc((size_t)(*count + 1) * sizeof *extents);
    if (extents == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < *count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        Py_ssize_t extent = item == NULL ? -1 : PyLong_AsSsize_t(item);
        Py_XDECREF(item);
        if (extent < 0 || extent >= space->extents) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_IndexError, "no extent %zd of %zd", extent, space->extents);
            free(extents);
            return NULL;
        }
        extents[i] = extent;
    }
    return extents;
}

typedef Reached (*Batch)(Space *, const Py_ssize_t *, Py_ssize_t);

static PyObject *
run_batch(Space *space, PyObject *sequence, Batch batch)
{
    Py_ssize_t count;
    Py_ssize_t *extents = parse_extents(space, sequence, &count);
    if (extents == NULL)
        return NULL;
    if (enter(space) < 0) {
        free(extents);
        return NULL;
    }
    Reached reached = stopped_at(0, STEP_NONE, SUCCESS);
    const char *name = "", *text = "";
    Py_BEGIN_ALLOW_THREADS
    Result result = count ? space->calls->context_push(space->context) : SUCCESS;
    if (result == SUCCESS) {
        if (count) {
            Context previous;
            reached = batch(space, extents, count);
            space->calls->context_pop(&previous);
        }
    } else {
        reached = (Reached){0, STEP_NONE, "cuCtxPushCurrent", result};
    }
    if (reached.number != SUCCESS) {
        space->calls->error_name(reached.number, &name);
        space->calls->error_text(reached.number, &text);
    }
    Py_END_ALLOW_THREADS
    leave(space);
    free(extents);
    return Py_BuildValue("(nssiss)", reached.done, step_names[reached.step],
                         reached.number ? reached.call : "", reached.number,
                         name ? name : "unknown", text ? text : "");
}

static PyObject *
space_create(PyObject *self, PyObject *extents)
{
    return run_batch((Space *)self, extents, create_batch);
}

static PyObject *
space_commit(PyObject *self, PyObject *extents)
{
    return run_batch((Space *)self, extents, commit_batch);
}

static PyObject *
space_abort(PyObject *self, PyObject *extents)
{
    return run_batch((Space *)self, extents, abort_batch);
}

static PyObject *
space_decommit(PyObject *self, PyObject *extents)
{
    return run_batch((Space *)self, extents, decommit_batch);
}

/* One call per strip and run of neighbours. */
static Result
zero_extents(Space *space, const Py_ssize_t *extents, Py_ssize_t count, Stream stream)
{
    for (Py_ssize_t strip = 0; strip < space->strips; strip++) {
        for (Py_ssize_t first = 0, next; first < count; first = next) {
            for (next = first + 1; next < count && extents[next] == extents[next - 1] + 1; next++)
                ;
            size_t bytes = space->strip[strip].bytes * (size_t)(next - first);
            Pointer at = address_of(space, extents[first], strip);
            Result result = space->calls->zero(at, 0, bytes, stream);
            if (result != SUCCESS)
                return result;
        }
    }
    return SUCCESS;
}

/* Beside batches of another thread: it touches no run's state. Another thread's launch on a full
 * queue keeps the driver's lock until there is room, which is why the engine's own thread zeroes. */
static PyObject *
space_zero(PyObject *self, PyObject *arguments)
{
    Space *space = (Space *)self;
    PyObject *sequence;
    unsigned long long stream;
    Py_ssize_t count;
    Context previous;
    if (!PyArg_ParseTuple(arguments, "OK", &sequence, &stream))
        return NULL;
    if (space->reservation == NULL) {
        PyErr_SetString(PyExc_ValueError, "the space is closed");
        return NULL;
    }
    Py_ssize_t *extents = parse_extents(space, sequence, &count);
    if (extents == NULL)
        return NULL;
    Result result;
    Py_BEGIN_ALLOW_THREADS
    result = space->calls->context_push(space->context);
    if (result == SUCCESS) {
        result = zero_extents(space, extents, count, (Stream)(uintptr_t)stream);
        space->calls->context_pop(&previous);
    }
    Py_END_ALLOW_THREADS
    free(extents);
    if (result != SUCCESS)
        return raise_failed(space->calls, "cuMemsetD8Async", result);
    Py_RETURN_NONE;
}

static PyObject *
space_read(PyObject *self, PyObject *unused)
{
    Space *space = (Space *)self;
    size_t free_bytes = 0, total_bytes = 0;
    Context previous;
    (void)unused;
    if (enter(space) < 0)
        return NULL;
    Result result;
    Py_BEGIN_ALLOW_THREADS
    result = space->calls->context_push(space->context);
    if (result == SUCCESS) {
        result = space->calls->memory_info(&free_bytes, &total_bytes);
        space->calls->context_pop(&previous);
    }
    Py_END_ALLOW_THREADS
    leave(space);
    if (result != SUCCESS)
        return raise_failed(space->calls, "cuMemGetInfo", result);
    return Py_BuildValue("(KK)", (unsigned long long)free_bytes, (unsigned long long)total_bytes);
}

/* Beside batches of another thread: that is what the caller waits in a helper thread for. */
static PyObject *
space_wait_device(PyObject *self, PyObject *unused)
{
    Space *space = (Space *)self;
    Context previous, context = space->context;
    (void)unused;
    if (context == NULL) {
        PyErr_SetString(PyExc_ValueError, "the space is closed");
        return NULL;
    }
    Result result;
    Py_BEGIN_ALLOW_THREADS
    result = space->calls->context_push(context);
    if (result == SUCCESS) {
        result = space->calls->context_wait();
        space->calls->context_pop(&previous);
    }
    Py_END_ALLOW_THREADS
    if (result != SUCCESS)
        return raise_failed(space->calls, "cuCtxSynchronize", result);
    Py_RETURN_NONE;
}

static PyObject *
space_dlpack(PyObject *self, PyObject *unused)
{
    Space *space = (Space *)self;
    (void)unused;
    if (space->reservation == NULL) {
        PyErr_SetString(PyExc_ValueError, "the space is closed");
        return NULL;
    }
    View *view = calloc(1, sizeof *view);
    if (view == NULL)
        return PyErr_NoMemory();
    view->reservation = space->reservation;
    view->shape = (int64_t)space->buffer_bytes;
    view->managed.manager = view;
    view->managed.deleter = delete_view;
    Tensor *tensor = &view->managed.tensor;
    tensor->data = (void *)(uintptr_t)space->reservation->base;
    tensor->device = (TensorDevice){DLPACK_CUDA, space->ordinal};
    tensor->dimensions = 1;
    tensor->type = (TensorType){DLPACK_INT, 8, 1};
    tensor->shape = &view->shape;
    atomic_fetch_add(&space->reservation->owners, 1);
    PyObject *capsule = PyCapsule_New(&view->managed, "dltensor", delete_unused_capsule);
    if (capsule == NULL)
        delete_view(&view->managed);
    return capsule;
}

/* Give everything back; the addresses stay reserved while a tensor refers to them. */
static void
close_space(Space *space)
{
    Reservation *reservation = space->reservation;
    const Calls *calls = space->calls;
    Context previous;
    if (space->context != NULL && calls->context_push(space->context) == SUCCESS) {
        for (Py_ssize_t extent = 0; reservation != NULL && extent < space->extents; extent++)
            decommit_batch(space, &extent, 1);
        calls->context_pop(&previous);
    }
    space->reservation = NULL;
    if (reservation != NULL)
        drop_reservation(reservation);
    if (space->context != NULL)
        calls->context_release(space->device);
    space->context = NULL;
}

static PyObject *
space_close(PyObject *self, PyObject *unused)
{
    Space *space = (Space *)self;
    (void)unused;
    if (atomic_flag_test_and_set(&space->busy)) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is in a call of this space");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    close_space(space);
    Py_END_ALLOW_THREADS
    leave(space);
    Py_RETURN_NONE;
}

static void
space_dealloc(PyObject *self)
{
    Space *space = (Space *)self;
    PyTypeObject *type = Py_TYPE(self);
    close_space(space);
    free(space->strip);
    free(space->run);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *
space_address(PyObject *self, void *unused)
{
    Space *space = (Space *)self;
    (void)unused;
    return PyLong_FromUnsignedLongLong(space->reservation ? space->reservation->base : 0);
}

static PyMethodDef space_methods[] = {
    {"create", space_create, METH_O, "Create the handles of all extents, or of none."},
    {"commit", space_commit, METH_O, "Map, and allow access."},
    {"abort", space_abort, METH_O, "Release handles that were never mapped."},
    {"decommit", space_decommit, METH_O, "Unmap and release."},
    {"zero", space_zero, METH_VARARGS, "Enqueue zeroes for extents, ascending, on a stream."},
    {"read", space_read, METH_NOARGS, "Return the device's free and total bytes."},
    {"wait_device", space_wait_device, METH_NOARGS, "Wait for all work on the device."},
    {"dlpack", space_dlpack, METH_NOARGS, "Return a DLPack capsule: int8, the whole buffer."},
    {"close", space_close, METH_NOARGS, "Give everything back. Idempotent."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef space_properties[] = {
    {"address", space_address, NULL, "First address of the buffer; 0 once closed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot space_slots[] = {
    {Py_tp_dealloc, space_dealloc},
    {Py_tp_methods, space_methods},
    {Py_tp_getset, space_properties},
    {Py_tp_doc, "One rank's reservation and the memory behind parts of it."},
    {0, NULL},
};

static PyType_Spec space_spec = {
    .name = "kvadmit._vmm_cuda.Space",
    .basicsize = sizeof(Space),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = space_slots,
};

static PyTypeObject *space_type;

/* --- the module ------------------------------------------------------------------------- */

static Library *
open_library(const char *path)
{
    for (Library *known = libraries; known != NULL; known = known->next)
        if (strcmp(known->path, path) == 0)
            return known;
    void *opened = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (opened == NULL) {
        PyErr_Format(PyExc_OSError, "%s", dlerror());
        return NULL;
    }
    Library *library = calloc(1, sizeof *library);
    char *copy = strdup(path);
    if (library == NULL || copy == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
#define RESOLVE(name, symbol, parameters)                                                        \
    *(void **)&library->calls.name = dlsym(opened, #symbol);                                     \
    if (library->calls.name == NULL) {                                                           \
        PyErr_Format(PyExc_OSError, "%s has no %s", path, #symbol);                              \
        goto fail;                                                                               \
    }
    DRIVER_CALLS(RESOLVE)
#undef RESOLVE
    Result result = library->calls.init(0);
    if (result != SUCCESS) {
        raise_failed(&library->calls, "cuInit", result);
        goto fail;
    }
    library->path = copy;
    library->next = libraries;
    libraries = library;
    return library;
fail:
    free(library);
    free(copy);
    return NULL;
}

static PyObject *
describe(PyObject *module, PyObject *arguments)
{
    const char *path;
    int ordinal, version = 0, count = 0, vmm = 0, mps = -1;
    Device device = 0;
    char name[256] = "";
    unsigned char uuid[16] = {0};
    size_t total_bytes = 0, granule_bytes = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "si", &path, &ordinal))
        return NULL;
    Library *library = open_library(path);
    if (library == NULL)
        return NULL;
    const Calls *calls = &library->calls;
    const char *call = "cuDriverGetVersion";
    Result result = calls->version(&version);
    if (result == SUCCESS && (call = "cuDeviceGetCount"))
        result = calls->device_count(&count);
    if (result == SUCCESS && (call = "cuDeviceGet"))
        result = calls->device_get(&device, ordinal);
    if (result == SUCCESS && (call = "cuDeviceGetName"))
        result = calls->device_name(name, sizeof name, device);
    if (result == SUCCESS && (call = "cuDeviceGetUuid"))
        result = calls->device_uuid(uuid, device);
    if (result == SUCCESS && (call = "cuDeviceTotalMem"))
        result = calls->device_bytes(&total_bytes, device);
    if (result == SUCCESS && (call = "cuDeviceGetAttribute"))
        result = calls->device_attribute(&vmm, ATTRIBUTE_VMM_SUPPORTED, device);
    if (result == SUCCESS && vmm && (call = "cuMemGetAllocationGranularity")) {
        AllocationProperties properties = properties_of(device);
        result = calls->granularity(&granule_bytes, &properties, GRANULARITY_MINIMUM);
    }
    if (result != SUCCESS)
        return raise_failed(calls, call, result);
    /* Drivers before 12.x do not know it; then nobody can say. */
    if (calls->device_attribute(&mps, ATTRIBUTE_MPS_ENABLED, device) != SUCCESS)
        mps = -1;
    return Py_BuildValue("{s:i,s:i,s:s,s:y#,s:K,s:i,s:K,s:i}", "driver_version", version,
                         "devices", count, "name", name, "uuid", (const char *)uuid,
                         (Py_ssize_t)sizeof uuid, "total_bytes", (unsigned long long)total_bytes,
                         "vmm", vmm, "granule_bytes", (unsigned long long)granule_bytes, "mps",
                         mps);
}

/* Parse `((base, bytes of a run), ...)`; NULL with an exception set. */
static Strip *
parse_strips(PyObject *sequence, Py_ssize_t *count)
{
    *count = PySequence_Size(sequence);
    if (*count < 0)
        return NULL;
    Strip *strips = calloc((size_t)*count + 1, sizeof *strips);
    if (strips == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < *count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        unsigned long long base, bytes;
        int parsed = item != NULL && PyArg_ParseTuple(item, "KK", &base, &bytes);
        Py_XDECREF(item);
        if (!parsed) {
            free(strips);
            return NULL;
        }
        strips[i] = (Strip){base, bytes};
    }
    return strips;
}

static PyObject *
open_space(PyObject *module, PyObject *arguments)
{
    const char *path;
    int ordinal;
    unsigned long long reserved_bytes, buffer_bytes;
    Py_ssize_t extents, strips;
    PyObject *sequence;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "siKKnO", &path, &ordinal, &reserved_bytes, &buffer_bytes,
                          &extents, &sequence))
        return NULL;
    Library *library = open_library(path);
    if (library == NULL)
        return NULL;
    allocfunc allocate = PyType_GetSlot(space_type, Py_tp_alloc);
    Space *space = (Space *)allocate(space_type, 0);
    if (space == NULL)
        return NULL;
    const Calls *calls = space->calls = &library->calls;
    space->ordinal = ordinal;
    space->buffer_bytes = buffer_bytes;
    space->extents = extents;
    atomic_flag_clear(&space->busy);
    space->strip = parse_strips(sequence, &strips);
    if (space->strip == NULL)
        goto fail;
    space->strips = strips;
    space->run = calloc((size_t)(extents * strips) + 1, sizeof *space->run);
    Reservation *reservation = calloc(1, sizeof *reservation);
    if (space->run == NULL || reservation == NULL) {
        free(reservation);
        PyErr_NoMemory();
        goto fail;
    }
    reservation->calls = calls;
    reservation->bytes = reserved_bytes;
    atomic_init(&reservation->owners, 1);
    const char *call = "cuDeviceGet";
    Context previous;
    Result result;
    Py_BEGIN_ALLOW_THREADS
    result = calls->device_get(&space->device, ordinal);
    if (result == SUCCESS && (call = "cuDevicePrimaryCtxRetain")) {
        result = calls->context_retain(&space->context, space->device);
        if (result != SUCCESS)
            space->context = NULL;
    }
    if (result == SUCCESS && (call = "cuCtxPushCurrent")) {
        result = calls->context_push(space->context);
        if (result == SUCCESS) {
            call = "cuMemAddressReserve";
            result = calls->reserve(&reservation->base, reservation->bytes, 0, 0, 0);
            calls->context_pop(&previous);
        }
    }
    Py_END_ALLOW_THREADS
    if (result != SUCCESS) {
        free(reservation);
        raise_failed(calls, call, result);
        goto fail;
    }
    space->reservation = reservation;
    return (PyObject *)space;
fail:
    Py_DECREF(space);
    return NULL;
}

static PyMethodDef module_methods[] = {
    {"describe", describe, METH_VARARGS,
     "describe(library, ordinal) -> what the driver says of a device, as a dict."},
    {"open_space", open_space, METH_VARARGS,
     "open_space(library, ordinal, reserved_bytes, buffer_bytes, extents, strips) -> Space; a\n"
     "strip is (base, bytes of a run)."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvadmit._vmm_cuda",
    .m_doc = "The CUDA driver's virtual memory calls, a batch of extents at a time.",
    .m_size = -1,
    .m_methods = module_methods,
};

PyMODINIT_FUNC
PyInit__vmm_cuda(void)
{
    PyObject *module = PyModule_Create(&module_definition);
    if (module == NULL)
        return NULL;
    failed = PyErr_NewExceptionWithDoc("kvadmit._vmm_cuda.Failed",
                                       "A driver call failed: (call, number, name, text).",
                                       PyExc_RuntimeError, NULL);
    space_type = (PyTypeObject *)PyType_FromSpec(&space_spec);
    if (failed == NULL || space_type == NULL || PyModule_AddObjectRef(module, "Failed", failed)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
