//! A small Objective-C runtime with a small Foundation, in Rust, for tests on machines without either.
//!
//! It is slow, and stricter than a real runtime. Memory of dead objects is kept, so that a message to a dead object is
//! reported with its class. An autorelease without a pool, or one release too many, ends the test.
//!
//! Its tests are those of the backend that runs on it, in `sim/tests` and `sim/anemoe/tests`.

/// Sets the instance variables of an allocated object, and initializes it.
#[macro_export]
macro_rules! init {
    ($this:expr, $ivars:expr) => {{
        let this = $this.set_ivars($ivars);
        // SAFETY: `init` is the designated initializer of every class of the sim.
        unsafe { objc2::msg_send![super(this), init] }
    }};
}

/// Defines a class of objects that hold one value, and its constructor.
#[macro_export]
macro_rules! class {
    ($(#[$doc:meta])* $class:ident, $name:literal, $ivars:ident, { $($methods:tt)* }) => {
        objc2::define_class!(
            $(#[$doc])*
            #[unsafe(super(objc2::runtime::NSObject))]
            #[name = $name]
            #[ivars = $ivars]
            pub(crate) struct $class;

            impl $class { $($methods)* }
        );

        impl $class {
            #[allow(dead_code, reason = "classes that callers initialize need no constructor")]
            pub(crate) fn new(value: $ivars) -> objc2::rc::Retained<Self> {
                $crate::init!(<Self as objc2::AnyThread>::alloc(), value)
            }
        }
    };
}

/// Exports functions with the calling convention of Objective-C.
macro_rules! exported {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)? $body:block)*) => { $(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe)]
        pub unsafe extern "C-unwind" fn $name($($arg: $type),*) $(-> $result)? { unsafe { $body } }
    )* };
}

mod blocks;
mod foundation;
mod runtime;
pub use blocks::{BLOCKS, COPIED};
pub use runtime::{alive, hold, made};

/// Registers the classes. Must run before any other use of Objective-C.
pub fn install() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(foundation::register);
}
