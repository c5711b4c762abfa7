/* A CUDA driver library for machines without a GPU: the entry points kvadmit loads, over memfd.
 *
 * The rules of the real one that a caller can break are enforced: whole granules, mapping only
 * into a reservation and only from a handle's start, access only to what is mapped, a current
 * context for all of it. A handle's bytes come dirty. What is put on a stream happens when the
 * context is waited for, so a wait that is left out shows; zeroes for what is not open then are an
 * illegal address for good. The budget is a file that processes share; a dead process's part
 * counts for nothing.
 *
 * Tests steer it by the functions named fake_*, in the same process.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    ILLEGAL_ADDRESS = 700,
    NOT_SUPPORTED = 801,
};

enum { GRANULE = 64 * 1024, DEVICES = 2, DIRTY = 0xA5, PROCESSES_MAX = 64, CALLS_MAX = 32 };

typedef unsigned long long Pointer;

/* --- what tests steer ------------------------------------------------------------------- */

typedef struct {
    char name[40];
    long made;
    long fail_at; /* the call of this number fails; 0: none */
    int number;
    int for_good;
    unsigned delay_us;
} Call;

static Call calls[CALLS_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int vmm_supported = 1, mps = 0;

static Call *
call_named(const char *name)
{
    for (int i = 0; i < CALLS_MAX; i++) {
        if (calls[i].name[0] == 0)
            snprintf(calls[i].name, sizeof calls[i].name, "%s", name);
        if (strcmp(calls[i].name, name) == 0)
            return &calls[i];
    }
    abort();
}

/* Have the `nth` call from now on fail with `number`, once or for good. */
EXPORT void
fake_fail(const char *name, long nth, int number, int for_good)
{
    Call *call = call_named(name);
    call->fail_at = call->made + nth;
    call->number = number;
    call->for_good = for_good;
}

EXPORT void
fake_delay(const char *name, unsigned microseconds)
{
    call_named(name)->delay_us = microseconds;
}

EXPORT long
fake_made(const char *name)
{
    return call_named(name)->made;
}

EXPORT void
fake_capabilities(int vmm, int served_by_mps)
{
    vmm_supported = vmm;
    mps = served_by_mps;
}

/* Count a call; return what it is to fail with. */
static int
begin(const char *name)
{
    pthread_mutex_lock(&lock);
    Call *call = call_named(name);
    long number = ++call->made;
    int fails = call->fail_at && (number == call->fail_at ||
                                  (call->for_good && number > call->fail_at));
    unsigned delay_us = call->delay_us;
    pthread_mutex_unlock(&lock);
    if (delay_us)
        usleep(delay_us);
    return fails ? call->number : SUCCESS;
}

#define BEGIN(name)                                                                              \
    do {                                                                                         \
        int failure = begin(name);                                                               \
        if (failure != SUCCESS)                                                                  \
            return failure;                                                                      \
    } while (0)

#define REQUIRE(condition, number)                                                               \
    do {                                                                                         \
        if (!(condition))                                                                        \
            return number;                                                                       \
    } while (0)

/* --- the budget ------------------------------------------------------------------------- */

typedef struct {
    size_t total_bytes;
    struct {
        pid_t pid;
        size_t bytes;
    } process[PROCESSES_MAX];
} Budget;

static Budget *budget;
static int budget_file = -1;

EXPORT void
fake_drop_budget(void)
{
    if (budget_file >= 0) {
        munmap(budget, sizeof *budget);
        close(budget_file);
    }
    budget = NULL;
    budget_file = -1;
}

/* Share the budget of `path`, which has `total_bytes` if this makes it. */
EXPORT int
fake_budget(const char *path, size_t total_bytes)
{
    fake_drop_budget();
    budget_file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (budget_file < 0 || ftruncate(budget_file, sizeof *budget))
        return -1;
    budget = mmap(NULL, sizeof *budget, PROT_READ | PROT_WRITE, MAP_SHARED, budget_file, 0);
    if (budget->total_bytes == 0)
        budget->total_bytes = total_bytes;
    return 0;
}

static size_t
used_bytes(void)
{
    size_t used = 0;
    for (int i = 0; i < PROCESSES_MAX; i++) {
        pid_t pid = budget->process[i].pid;
        if (pid && kill(pid, 0) && errno == ESRCH)
            budget->process[i].pid = 0, budget->process[i].bytes = 0;
        used += budget->process[i].bytes;
    }
    return used;
}

static int
book(long long bytes)
{
    int booked = 0;
    flock(budget_file, LOCK_EX);
    if (bytes < 0 || used_bytes() + (size_t)bytes <= budget->total_bytes) {
        for (int mine = 1; mine >= 0 && !booked; mine--) {
            for (int i = 0; i < PROCESSES_MAX && !booked; i++) {
                if (budget->process[i].pid == (mine ? getpid() : 0)) {
                    budget->process[i].pid = getpid();
                    budget->process[i].bytes += (size_t)bytes;
                    booked = 1;
                }
            }
        }
    }
    flock(budget_file, LOCK_UN);
    return booked;
}

/* --- handles, reservations, mappings ---------------------------------------------------- */

typedef struct Handle {
    struct Handle *next;
    int file;
    size_t bytes;
    int mappings;
    int released;
} Handle;

typedef struct Range {
    struct Range *next;
    Pointer base;
    size_t bytes;
    Handle *handle; /* of a mapping */
    int open;
} Range;

typedef struct Work {
    struct Work *next;
    Pointer at;
    unsigned char value;
    size_t bytes;
} Work;

static Handle *handles;
static Range *reservations, *mappings;
static Work *enqueued;
static int contexts[DEVICES], sticky;
static __thread int pushed; /* contexts current on this thread, one over the other */

static int
count(const Range *range)
{
    int found = 0;
    for (; range != NULL; range = range->next)
        found++;
    return found;
}

/* Return how many of `what` there are. */
EXPORT int
fake_live(const char *what)
{
    if (strcmp(what, "handles") == 0) {
        int found = 0;
        for (Handle *handle = handles; handle != NULL; handle = handle->next)
            found++;
        return found;
    }
    if (strcmp(what, "reservations") == 0)
        return count(reservations);
    if (strcmp(what, "mappings") == 0)
        return count(mappings);
    if (strcmp(what, "contexts") == 0)
        return contexts[0] + contexts[1];
    if (strcmp(what, "pushed") == 0)
        return pushed;
    return -1;
}

static Range **
exactly(Range **list, Pointer base, size_t bytes)
{
    for (Range **at = list; *at != NULL; at = &(*at)->next)
        if ((*at)->base == base && (*at)->bytes == bytes)
            return at;
    return NULL;
}

static int
overlaps(const Range *range, Pointer base, size_t bytes)
{
    for (; range != NULL; range = range->next)
        if (base < range->base + range->bytes && range->base < base + bytes)
            return 1;
    return 0;
}

static int
inside(const Range *range, Pointer base, size_t bytes)
{
    for (; range != NULL; range = range->next)
        if (range->base <= base && base + bytes <= range->base + range->bytes)
            return 1;
    return 0;
}

static void
forget(Range **at)
{
    Range *range = *at;
    *at = range->next;
    free(range);
}

static void
remember(Range **list, Pointer base, size_t bytes, Handle *handle)
{
    Range *range = calloc(1, sizeof *range);
    *range = (Range){*list, base, bytes, handle, 0};
    *list = range;
}

static void
free_if_unused(Handle *handle)
{
    if (!handle->released || handle->mappings)
        return;
    for (Handle **at = &handles; *at != NULL; at = &(*at)->next) {
        if (*at == handle) {
            *at = handle->next;
            book(-(long long)handle->bytes);
            close(handle->file);
            free(handle);
            return;
        }
    }
}

/* --- the entry points ------------------------------------------------------------------- */

EXPORT int
cuInit(unsigned flags)
{
    (void)flags;
    BEGIN("cuInit");
    REQUIRE(budget != NULL, NO_DEVICE);
    return SUCCESS;
}

EXPORT int
cuDriverGetVersion(int *version)
{
    BEGIN("cuDriverGetVersion");
    *version = 13000;
    return SUCCESS;
}

EXPORT int
cuGetErrorName(int number, const char **name)
{
    switch (number) {
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
    case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
    case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    case NOT_SUPPORTED: *name = "CUDA_ERROR_NOT_SUPPORTED"; break;
    default: *name = NULL; return INVALID_VALUE;
    }
    return SUCCESS;
}

EXPORT int
cuGetErrorString(int number, const char **text)
{
    *text = number == OUT_OF_MEMORY ? "out of memory" : "an error of the fake driver";
    return SUCCESS;
}

EXPORT int
cuDeviceGetCount(int *devices)
{
    BEGIN("cuDeviceGetCount");
    *devices = DEVICES;
    return SUCCESS;
}

EXPORT int
cuDeviceGet(int *device, int ordinal)
{
    BEGIN("cuDeviceGet");
    REQUIRE(ordinal >= 0 && ordinal < DEVICES, INVALID_DEVICE);
    *device = ordinal;
    return SUCCESS;
}

EXPORT int
cuDeviceGetName(char *name, int length, int device)
{
    BEGIN("cuDeviceGetName");
    snprintf(name, (size_t)length, "Fake GPU %d", device);
    return SUCCESS;
}

EXPORT int
cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
    BEGIN("cuDeviceGetUuid");
    memset(uuid, 0x10 + device, 16);
    return SUCCESS;
}

EXPORT int
cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    (void)device;
    BEGIN("cuDeviceTotalMem");
    *bytes = budget->total_bytes;
    return SUCCESS;
}

EXPORT int
cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)device;
    BEGIN("cuDeviceGetAttribute");
    REQUIRE(attribute == 102 || (attribute == 133 && mps >= 0), INVALID_VALUE);
    *value = attribute == 102 ? vmm_supported : mps;
    return SUCCESS;
}

EXPORT int
cuDevicePrimaryCtxRetain(void **context, int device)
{
    BEGIN("cuDevicePrimaryCtxRetain");
    contexts[device]++;
    *context = &contexts[device];
    return SUCCESS;
}

EXPORT int
cuDevicePrimaryCtxRelease_v2(int device)
{
    BEGIN("cuDevicePrimaryCtxRelease");
    REQUIRE(contexts[device] > 0, INVALID_CONTEXT);
    contexts[device]--;
    return SUCCESS;
}

EXPORT int
cuCtxPushCurrent_v2(void *context)
{
    BEGIN("cuCtxPushCurrent");
    REQUIRE(context != NULL, INVALID_CONTEXT);
    pushed++;
    return SUCCESS;
}

EXPORT int
cuCtxPopCurrent_v2(void **context)
{
    BEGIN("cuCtxPopCurrent");
    REQUIRE(pushed > 0, INVALID_CONTEXT);
    pushed--;
    *context = NULL;
    return SUCCESS;
}

/* Whether every byte is open; ranges may be of several mappings side by side. */
static int
all_open(Pointer at, size_t bytes)
{
    Pointer end = at + bytes;
    while (at < end) {
        const Range *range = mappings;
        while (range != NULL && !(range->open && range->base <= at && at < range->base + range->bytes))
            range = range->next;
        if (range == NULL)
            return 0;
        at = range->base + range->bytes;
    }
    return 1;
}

EXPORT int
cuCtxSynchronize(void)
{
    BEGIN("cuCtxSynchronize");
    REQUIRE(pushed, INVALID_CONTEXT);
    pthread_mutex_lock(&lock);
    while (enqueued != NULL) {
        Work *work = enqueued;
        enqueued = work->next;
        if (!sticky && all_open(work->at, work->bytes))
            memset((void *)(uintptr_t)work->at, work->value, work->bytes);
        else
            sticky = ILLEGAL_ADDRESS;
        free(work);
    }
    pthread_mutex_unlock(&lock);
    return sticky;
}

EXPORT int
cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    BEGIN("cuMemGetInfo");
    REQUIRE(pushed, INVALID_CONTEXT);
    flock(budget_file, LOCK_EX);
    *total_bytes = budget->total_bytes;
    *free_bytes = budget->total_bytes - used_bytes();
    flock(budget_file, LOCK_UN);
    return SUCCESS;
}

EXPORT int
cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option)
{
    (void)properties, (void)option;
    BEGIN("cuMemGetAllocationGranularity");
    *bytes = GRANULE;
    return SUCCESS;
}

EXPORT int
cuMemAddressReserve(Pointer *base, size_t bytes, size_t alignment, Pointer hint,
                    unsigned long long flags)
{
    (void)alignment, (void)hint;
    BEGIN("cuMemAddressReserve");
    REQUIRE(bytes && bytes % GRANULE == 0 && flags == 0, INVALID_VALUE);
    char *found = mmap(NULL, bytes + GRANULE, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(found != MAP_FAILED, OUT_OF_MEMORY);
    uintptr_t aligned = ((uintptr_t)found + GRANULE - 1) / GRANULE * GRANULE;
    if (aligned > (uintptr_t)found)
        munmap(found, aligned - (uintptr_t)found);
    if (aligned < (uintptr_t)found + GRANULE)
        munmap((char *)aligned + bytes, (uintptr_t)found + GRANULE - aligned);
    pthread_mutex_lock(&lock);
    remember(&reservations, aligned, bytes, NULL);
    pthread_mutex_unlock(&lock);
    *base = aligned;
    return SUCCESS;
}

EXPORT int
cuMemAddressFree(Pointer base, size_t bytes)
{
    BEGIN("cuMemAddressFree");
    int number = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    Range **found = exactly(&reservations, base, bytes);
    if (found != NULL && !overlaps(mappings, base, bytes)) {
        munmap((void *)(uintptr_t)base, bytes);
        forget(found);
        number = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return number;
}

EXPORT int
cuMemCreate(Pointer *handle, size_t bytes, const int *properties, unsigned long long flags)
{
    BEGIN("cuMemCreate");
    REQUIRE(pushed, INVALID_CONTEXT);
    /* pinned, not exported, on a device that exists */
    REQUIRE(properties[0] == 1 && properties[1] == 0 && properties[2] == 1, INVALID_VALUE);
    REQUIRE(properties[3] >= 0 && properties[3] < DEVICES && flags == 0, INVALID_DEVICE);
    REQUIRE(bytes && bytes % GRANULE == 0, INVALID_VALUE);
    REQUIRE(book((long long)bytes), OUT_OF_MEMORY);
    Handle *made = calloc(1, sizeof *made);
    made->file = memfd_create("fake-gpu", MFD_CLOEXEC);
    made->bytes = bytes;
    void *dirty = MAP_FAILED;
    if (ftruncate(made->file, (off_t)bytes) == 0)
        dirty = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made->file, 0);
    if (dirty == MAP_FAILED)
        abort();
    memset(dirty, DIRTY, bytes);
    munmap(dirty, bytes);
    pthread_mutex_lock(&lock);
    made->next = handles;
    handles = made;
    pthread_mutex_unlock(&lock);
    *handle = (Pointer)(uintptr_t)made;
    return SUCCESS;
}

EXPORT int
cuMemRelease(Pointer handle)
{
    BEGIN("cuMemRelease");
    int number = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (Handle *known = handles; known != NULL; known = known->next) {
        if ((Pointer)(uintptr_t)known == handle && !known->released) {
            known->released = 1;
            free_if_unused(known);
            number = SUCCESS;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return number;
}

EXPORT int
cuMemMap(Pointer at, size_t bytes, size_t offset, Pointer handle, unsigned long long flags)
{
    BEGIN("cuMemMap");
    REQUIRE(pushed, INVALID_CONTEXT);
    REQUIRE(at % GRANULE == 0 && bytes % GRANULE == 0 && offset == 0 && flags == 0,
            INVALID_VALUE);
    int number = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (Handle *known = handles; known != NULL; known = known->next) {
        if ((Pointer)(uintptr_t)known != handle || known->released || known->bytes != bytes)
            continue;
        if (inside(reservations, at, bytes) && !overlaps(mappings, at, bytes)) {
            known->mappings++;
            remember(&mappings, at, bytes, known);
            number = SUCCESS;
        }
    }
    pthread_mutex_unlock(&lock);
    return number;
}

EXPORT int
cuMemSetAccess(Pointer at, size_t bytes, const int *access, size_t descriptions)
{
    BEGIN("cuMemSetAccess");
    REQUIRE(pushed, INVALID_CONTEXT);
    REQUIRE(descriptions == 1 && access[0] == 1 && access[2] == 3, INVALID_VALUE);
    int number = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    Range **found = exactly(&mappings, at, bytes);
    if (found != NULL) {
        void *there = mmap((void *)(uintptr_t)at, bytes, PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_FIXED, (*found)->handle->file, 0);
        if (there == MAP_FAILED)
            abort();
        (*found)->open = 1;
        number = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return number;
}

EXPORT int
cuMemUnmap(Pointer at, size_t bytes)
{
    BEGIN("cuMemUnmap");
    int number = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    Range **found = exactly(&mappings, at, bytes);
    if (found != NULL) {
        Handle *handle = (*found)->handle;
        mmap((void *)(uintptr_t)at, bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        forget(found);
        handle->mappings--;
        free_if_unused(handle);
        number = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return number;
}

EXPORT int
cuMemsetD8Async(Pointer at, unsigned char value, size_t bytes, void *stream)
{
    BEGIN("cuMemsetD8Async");
    REQUIRE(pushed, INVALID_CONTEXT);
    (void)stream; /* all of them are waited for at once */
    Work *work = calloc(1, sizeof *work);
    *work = (Work){NULL, at, value, bytes};
    pthread_mutex_lock(&lock);
    Work **end = &enqueued;
    while (*end != NULL)
        end = &(*end)->next;
    *end = work;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
