//! Faults that tests plant.

use objc2::rc::Retained;
use objc2::runtime::AnyObject;
use objc2_foundation::{NSDictionary, NSError, NSException, NSLocalizedDescriptionKey, NSString};
use std::path::Path;
use std::sync::Mutex;

/// A fault of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It cannot be compiled.
    NotCompiled,
    /// It cannot be loaded: -14.
    NoPlan,
    /// To load it raises an exception.
    LoadException,
    /// The handler of loading is let go uncalled.
    NoAnswer,
    /// The handler of loading gets neither model nor error.
    EmptyAnswer,
    /// So many predictions are right, and the next ones errors.
    Error(usize),
    /// So many predictions are right, and the next ones exceptions.
    Exception(usize),
    /// Results are arrays of their own, whatever backings are proposed.
    NoBackings,
}

static FAULTS: Mutex<Vec<(String, Fault)>> = Mutex::new(Vec::new());

/// Plants a fault in every model whose package's path contains `part`.
pub fn plant(part: &str, fault: Fault) {
    FAULTS.lock().unwrap().push((part.into(), fault));
}

/// Takes all faults away.
pub fn clear_faults() {
    FAULTS.lock().unwrap().clear();
}

/// The faults of a package.
pub(crate) fn faults(package: &Path) -> Vec<Fault> {
    let path = package.display().to_string();
    FAULTS.lock().unwrap().iter().filter(|(part, _)| path.contains(part)).map(|(_, fault)| *fault).collect()
}

/// Raises an exception.
pub(crate) fn raise(reason: &str) -> ! {
    let name = NSString::from_str("NSInvalidArgumentException");
    let exception = NSException::new(&name, Some(&NSString::from_str(reason)), None).unwrap();
    // SAFETY: an NSException may be thrown.
    unsafe {
        let object: Retained<objc2::exception::Exception> = Retained::cast_unchecked(exception);
        objc2::exception::throw(object)
    }
}

/// An autoreleased error, as Cocoa makes them.
pub(crate) fn error(code: isize, text: &str) -> *mut NSError {
    let text = NSString::from_str(text);
    // SAFETY: the key is set when the classes are registered, and values are objects.
    let error = unsafe {
        let info = NSDictionary::<NSString, AnyObject>::from_slices(
            &[NSLocalizedDescriptionKey],
            &[&*text as &AnyObject],
        );
        NSError::errorWithDomain_code_userInfo(&NSString::from_str("com.apple.CoreML"), code, Some(&info))
    };
    Retained::autorelease_ptr(error)
}
