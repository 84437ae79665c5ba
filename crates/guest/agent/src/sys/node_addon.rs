//! A Node.js add-on that reseeds OpenSSL, which JavaScript cannot do.
//!
//! `build.rs` compiles this file into a shared object of its own, without the standard library and without libc as a
//! dependency, and the agent carries it in itself. The runner of Node.js interpreters loads it. All symbols it needs
//! are in the process already: Node-API, and OpenSSL, which is linked into Node.js or is a library that Node.js loads.
//!
//! JavaScript sees one function, `reseed(buffer)`. It mixes the buffer and fresh bytes of the kernel into OpenSSL's
//! primary generator; the generators of all threads reseed from the primary before their next output. It returns
//! whether OpenSSL did so.
#![no_std]

use core::ffi::{c_char, c_int, c_void};

type Env = *mut c_void;
type Value = *mut c_void;
type Info = *mut c_void;
type Callback = unsafe extern "C" fn(Env, Info) -> Value;
/// `napi_status` of a call that succeeded.
const OK: c_int = 0;
/// The version of Node-API that has all the functions used here.
const NODE_API_VERSION: i32 = 1;
unsafe extern "C" {
    fn napi_create_function(
        env: Env,
        name: *const c_char,
        length: usize,
        callback: Callback,
        data: *mut c_void,
        result: *mut Value,
    ) -> c_int;
    fn napi_set_named_property(env: Env, object: Value, name: *const c_char, value: Value) -> c_int;
    fn napi_get_cb_info(
        env: Env,
        info: Info,
        count: *mut usize,
        arguments: *mut Value,
        this: *mut Value,
        data: *mut *mut c_void,
    ) -> c_int;
    fn napi_get_buffer_info(env: Env, value: Value, data: *mut *mut c_void, length: *mut usize) -> c_int;
    fn napi_get_boolean(env: Env, value: bool, result: *mut Value) -> c_int;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// The program and everything it was linked with.
const ALL_LIBRARIES: *mut c_void = core::ptr::null_mut();

/// The one argument of a call; null if there is none.
unsafe fn argument(env: Env, info: Info) -> Value {
    let mut count = 1;
    let mut value = core::ptr::null_mut();
    // SAFETY: `env` and `info` are those of the call, and there is room for the one argument that is asked for.
    let status = unsafe {
        napi_get_cb_info(
            env,
            info,
            &raw mut count,
            &raw mut value,
            core::ptr::null_mut(),
            core::ptr::null_mut(),
        )
    };
    if status == OK && count >= 1 { value } else { core::ptr::null_mut() }
}

unsafe fn boolean(env: Env, value: bool) -> Value {
    let mut result = core::ptr::null_mut();
    // SAFETY: `env` is that of the call, the result is a live local; on failure it stays null, which is `undefined`.
    unsafe { napi_get_boolean(env, value, &raw mut result) };
    result
}

unsafe extern "C" fn reseed(env: Env, info: Info) -> Value {
    let mut data = core::ptr::null_mut();
    let mut length = 0;
    // SAFETY: the pointers are to live locals; a value that is no buffer is an error of the call.
    let found = unsafe { napi_get_buffer_info(env, argument(env, info), &raw mut data, &raw mut length) } == OK;
    // SAFETY: the buffer lives until this call returns, and `mix` only reads it.
    unsafe { boolean(env, found && mix(data, length)) }
}

/// Calls `RAND_seed`, which reseeds the primary generator from the kernel with these bytes as additional input.
unsafe fn mix(data: *const c_void, length: usize) -> bool {
    let Ok(length) = c_int::try_from(length) else {
        return false;
    };
    // SAFETY: names are constants that end with zero.
    let (seed, status) = unsafe {
        (dlsym(ALL_LIBRARIES, c"RAND_seed".as_ptr()), dlsym(ALL_LIBRARIES, c"RAND_status".as_ptr()))
    };
    if seed.is_null() || status.is_null() {
        return false;
    }
    // SAFETY: the two are functions of these types in every version of OpenSSL; the bytes are as many as `length` says.
    unsafe {
        let seed: unsafe extern "C" fn(*const c_void, c_int) = core::mem::transmute(seed);
        let status: unsafe extern "C" fn() -> c_int = core::mem::transmute(status);
        seed(data, length);
        status() == 1
    }
}

/// Node.js asks for this before it loads the add-on.
#[unsafe(no_mangle)]
pub extern "C" fn node_api_module_get_api_version_v1() -> i32 {
    NODE_API_VERSION
}

/// Node.js calls this to fill in the exports of the add-on.
///
/// # Safety
/// Called by Node.js alone, with an environment and an object of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn napi_register_module_v1(env: Env, exports: Value) -> Value {
    let mut function = core::ptr::null_mut();
    // SAFETY: `env` and `exports` are the values that Node.js passed; the name is a constant; the result is a local.
    unsafe {
        let name = c"reseed";
        let made = napi_create_function(
            env,
            name.as_ptr(),
            name.count_bytes(),
            reseed,
            core::ptr::null_mut(),
            &raw mut function,
        );
        if made == OK {
            napi_set_named_property(env, exports, name.as_ptr(), function);
        }
    }
    exports
}

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
