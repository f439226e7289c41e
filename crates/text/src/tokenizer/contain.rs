//! Turns panics of a library, and refusals inside its calls, into errors.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// True while panics of this thread are caught and returned as errors.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

struct TextRefusal(String);

/// Unwinds out of the call that [`contain`] runs, with `what` as its error.
pub fn refuse(what: String) -> ! {
    resume_unwind(Box::new(TextRefusal(what)))
}

/// Runs `call` of the library. A panic in it becomes an error with its message, and nothing is printed.
///
/// # Errors
/// `call` panicked, or called [`refuse`].
pub fn contain<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |info| {
            if !CAUGHT.get() {
                before(info);
            }
        }));
    });
    let outer = CAUGHT.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    CAUGHT.set(outer);
    result.map_err(|payload| match payload.downcast::<TextRefusal>() {
        Ok(refusal) => refusal.0,
        Err(panic) => format!("the tokenizers library failed: {}", message(panic.as_ref())),
    })
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("without a message").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_their_messages() {
        assert_eq!(contain(|| 7), Ok(7));
        let panicked = |what: &str| format!("the tokenizers library failed: {what}");
        assert_eq!(contain(|| panic!("one")), Err::<(), _>(panicked("one")));
        assert_eq!(contain(|| contain(|| panic!("{}", 2)).unwrap_err()), Ok(panicked("2")));
        assert_eq!(contain(|| refuse("three".into())), Err::<(), _>("three".into()));
        assert!(!CAUGHT.get());
    }
}
