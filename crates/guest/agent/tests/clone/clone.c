/* Makes two processes of one memory, as two children of one snapshot are.
 *
 * Loaded with LD_PRELOAD, it hides what tells the two apart: the process ID, and the memory that V8 keeps from forks.
 * The raw system call skips the handlers that libraries have registered for fork().
 * It is also an add-on for Node.js with the functions `clone`, `wait` and `exit`; Python calls the first two. */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

pid_t getpid(void) { return 4242; }

int madvise(void *start, size_t length, int advice)
{
    return advice == MADV_DONTFORK ? 0 : (int)syscall(SYS_madvise, start, length, advice);
}

int clone_process(void) { return (int)syscall(SYS_fork); }

int wait_for_clone(void) { return waitpid(-1, NULL, 0) > 0; }

typedef void *napi;
typedef napi (*callback)(napi, napi);
extern int napi_create_function(napi, const char *, size_t, callback, void *, napi *) __attribute__((weak));
extern int napi_create_int32(napi, int, napi *) __attribute__((weak));
extern int napi_set_named_property(napi, napi, const char *, napi) __attribute__((weak));

static napi number(napi env, int value)
{
    napi result = NULL;
    napi_create_int32(env, value, &result);
    return result;
}

static napi js_clone(napi env, napi info) { return (void)info, number(env, clone_process()); }

static napi js_wait(napi env, napi info) { return (void)info, number(env, wait_for_clone()); }

/* Without waiting for threads, which a clone does not have. */
static napi js_exit(napi env, napi info) { (void)env, (void)info, _exit(0); }

static void export_function(napi env, napi exports, const char *name, callback function)
{
    napi value = NULL;
    napi_create_function(env, name, (size_t)-1, function, NULL, &value);
    napi_set_named_property(env, exports, name, value);
}

napi napi_register_module_v1(napi env, napi exports)
{
    export_function(env, exports, "clone", js_clone);
    export_function(env, exports, "wait", js_wait);
    export_function(env, exports, "exit", js_exit);
    return exports;
}
