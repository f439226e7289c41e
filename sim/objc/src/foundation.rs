//! NSObject and the few classes of Foundation that Core ML code uses.
#![allow(non_snake_case)]
use crate::runtime::*;
use objc2::encode::{Encode, Encoding, RefEncode};
use objc2::rc::{Allocated, Retained};
use objc2::runtime::{AnyClass, AnyObject, NSObject, NSObjectProtocol, NSZone};
use objc2::{AnyThread, ClassType, DefinedClass, Message, msg_send};
use std::ffi::{CStr, CString, c_char, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ptr::null_mut;
use std::sync::OnceLock;

type Object = Retained<AnyObject>;
type Objects = Vec<Object>;

pub fn raise(name: &str, reason: &str) -> ! {
    let e = FakeException::new(ExceptionIvars { name: string(name), reason: Some(string(reason)) });
    unsafe { throw(Retained::into_raw(e).cast()) }
}

pub struct Text {
    text: String,
    c: OnceLock<CString>,
}
class! { FakeString, "NSString", Text, {
    #[unsafe(method_id(initWithBytes:length:encoding:))]
    fn init_bytes(this: Allocated<Self>, bytes: *const c_void, length: usize, encoding: i32) -> Option<Retained<Self>> {
        assert_eq!(encoding, 4, "only UTF-8");
        let bytes = if length == 0 { &[][..] } else { unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), length) } };
        std::str::from_utf8(bytes).ok().map(|text| {
            init!(this, Text { text: text.into(), c: OnceLock::new() })
        })
    }
    #[unsafe(method(UTF8String))]
    fn utf8(&self) -> *const c_char { self.ivars().c.get_or_init(|| CString::new(self.ivars().text.as_str()).unwrap()).as_ptr() }
    #[unsafe(method(lengthOfBytesUsingEncoding:))]
    fn bytes(&self, _encoding: i32) -> usize { self.ivars().text.len() }
    #[unsafe(method(length))]
    fn length(&self) -> usize { self.ivars().text.encode_utf16().count() }
    #[unsafe(method_id(copyWithZone:))]
    fn copy(&self, _zone: *mut NSZone) -> Retained<Self> { self.retain() }
    #[unsafe(method(isEqual:))]
    fn is_equal(&self, other: Option<&AnyObject>) -> bool { other.and_then(as_str).is_some_and(|o| o == self.ivars().text) }
    #[unsafe(method(isEqualToString:))]
    fn is_equal_string(&self, other: &AnyObject) -> bool { as_str(other).is_some_and(|o| o == self.ivars().text) }
    #[unsafe(method(hash))]
    fn hash(&self) -> usize { let mut h = DefaultHasher::new(); self.ivars().text.hash(&mut h); h.finish() as usize }
    #[unsafe(method_id(description))]
    fn description(&self) -> Retained<Self> { self.retain() }
} }
pub fn string(text: &str) -> Object {
    FakeString::new(Text { text: text.into(), c: OnceLock::new() }).into_super().into_super()
}
fn as_str(o: &AnyObject) -> Option<&str> {
    o.downcast_ref_fake::<FakeString>().map(|s| s.ivars().text.as_str())
}

trait Downcast {
    fn downcast_ref_fake<T: ClassType>(&self) -> Option<&T>;
}
impl Downcast for AnyObject {
    fn downcast_ref_fake<T: ClassType>(&self) -> Option<&T> {
        let o: &NSObject = unsafe { &*std::ptr::from_ref(self).cast() };
        o.isKindOfClass(T::class()).then(|| unsafe { &*std::ptr::from_ref(self).cast() })
    }
}

#[derive(Clone, Copy)]
pub enum Number {
    I(i64),
    U(u64),
    F(f64),
}
macro_rules! number {
    ($($make:ident $get:ident $t:ty, $v:ident;)*) => {
        class! { FakeNumber, "NSNumber", Number, {
            $( #[unsafe(method_id($make:))] fn $make(v: $t) -> Retained<Self> { Self::new(Number::$v(v as _)) }
               #[unsafe(method($get))] fn $get(&self) -> $t { match *self.ivars() { Number::I(v) => v as $t, Number::U(v) => v as $t, Number::F(v) => v as $t } } )*
            #[unsafe(method_id(copyWithZone:))]
            fn copy(&self, _zone: *mut NSZone) -> Retained<Self> { self.retain() }
            #[unsafe(method_id(stringValue))]
            fn text(&self) -> Object { string(&match *self.ivars() { Number::I(v) => v.to_string(), Number::U(v) => v.to_string(), Number::F(v) => v.to_string() }) }
        } }
    };
}
number! {
    numberWithInt intValue i32, I; numberWithLongLong longLongValue i64, I; numberWithInteger integerValue isize, I;
    numberWithUnsignedInteger unsignedIntegerValue usize, U; numberWithFloat floatValue f32, F; numberWithDouble doubleValue f64, F;
}

#[repr(C)]
pub struct Enumeration {
    state: u64,
    items: *const *const AnyObject,
    mutations: *const u64,
    extra: [u64; 5],
}
const U: Encoding = <u64 as Encode>::ENCODING;
unsafe impl RefEncode for Enumeration {
    const ENCODING_REF: Encoding = Encoding::Pointer(&Encoding::Struct(
        "?",
        &[U, Encoding::Pointer(&Encoding::Object), Encoding::Pointer(&U), Encoding::Array(5, &U)],
    ));
}
static NO_MUTATIONS: u64 = 0;
/// Returns all items at once for fast enumeration. Relies on `Retained` being a plain pointer.
unsafe fn enumerate(items: &[Object], e: *mut Enumeration) -> usize {
    unsafe {
        if (*e).state != 0 {
            return 0;
        }
        ((*e).state, (*e).items, (*e).mutations) = (1, items.as_ptr().cast(), &NO_MUTATIONS);
    }
    items.len()
}
unsafe fn collect(objects: *const *const AnyObject, count: usize, class: &str) -> Vec<Object> {
    (0..count)
        .map(|i| match unsafe { (*objects.add(i)).as_ref() } {
            Some(o) => o.retain(),
            None => raise("NSInvalidArgumentException", &format!("nil at {i} of a new {class}")),
        })
        .collect()
}
fn same(a: &AnyObject, b: &AnyObject) -> bool {
    unsafe { msg_send![a, isEqual: b] }
}

macro_rules! collections { ($($name:literal $rust:ident)*) => { $(
    class! { $rust, $name, Objects, {
        #[unsafe(method_id(init))]
        fn init(this: Allocated<Self>) -> Retained<Self> { init!(this, Vec::new()) }
        #[unsafe(method_id(initWithObjects:count:))]
        fn init_objects(this: Allocated<Self>, objects: *const *const AnyObject, count: usize) -> Retained<Self> {
            init!(this, unsafe { collect(objects, count, $name) })
        }
        #[unsafe(method(count))]
        fn count(&self) -> usize { self.ivars().len() }
        #[unsafe(method_id(objectAtIndex:))]
        fn at(&self, index: usize) -> Object {
            self.ivars().get(index).cloned().unwrap_or_else(|| raise("NSRangeException", &format!("index {index} beyond {}", self.ivars().len())))
        }
        #[unsafe(method_id(firstObject))]
        fn first(&self) -> Option<Object> { self.ivars().first().cloned() }
        #[unsafe(method(containsObject:))]
        fn contains(&self, object: &AnyObject) -> bool { self.ivars().iter().any(|o| same(o, object)) }
        #[unsafe(method(countByEnumeratingWithState:objects:count:))]
        fn enumerate(&self, state: *mut Enumeration, _buffer: *mut *mut AnyObject, _count: usize) -> usize { unsafe { enumerate(self.ivars(), state) } }
        #[unsafe(method_id(copyWithZone:))]
        fn copy(&self, _zone: *mut NSZone) -> Retained<Self> { self.retain() }
    } }
)* } }
collections! { "NSArray" FakeArray "NSSet" FakeSet }

#[derive(Default)]
pub struct Pairs {
    keys: Vec<Object>,
    values: Vec<Object>,
}
class! { FakeDictionary, "NSDictionary", Pairs, {
    #[unsafe(method_id(init))]
    fn init(this: Allocated<Self>) -> Retained<Self> { init!(this, Pairs::default()) }
    #[unsafe(method_id(initWithObjects:forKeys:count:))]
    fn init_pairs(this: Allocated<Self>, objects: *const *const AnyObject, keys: *const *const AnyObject, count: usize) -> Retained<Self> {
        let pairs = unsafe { Pairs { keys: collect(keys, count, "NSDictionary"), values: collect(objects, count, "NSDictionary") } };
        init!(this, pairs)
    }
    #[unsafe(method(count))]
    fn count(&self) -> usize { self.ivars().keys.len() }
    #[unsafe(method_id(objectForKey:))]
    fn get(&self, key: &AnyObject) -> Option<Object> {
        let i = self.ivars();
        i.keys.iter().position(|k| same(k, key)).map(|at| i.values[at].clone())
    }
    #[unsafe(method(countByEnumeratingWithState:objects:count:))]
    fn enumerate(&self, state: *mut Enumeration, _buffer: *mut *mut AnyObject, _count: usize) -> usize { unsafe { enumerate(&self.ivars().keys, state) } }
    #[unsafe(method_id(copyWithZone:))]
    fn copy(&self, _zone: *mut NSZone) -> Retained<Self> { self.retain() }
} }

class! { FakeUrl, "NSURL", Object, {
    #[unsafe(method_id(fileURLWithPath:))]
    fn file(path: &AnyObject) -> Retained<Self> { Self::new(path.retain()) }
    #[unsafe(method_id(path))]
    fn path(&self) -> Option<Object> { Some(self.ivars().clone()) }
} }

pub struct ErrorIvars {
    domain: Object,
    code: isize,
    info: Option<Object>,
}
class! { FakeError, "NSError", ErrorIvars, {
    #[unsafe(method_id(underlyingErrors))]
    fn causes(&self) -> Object {
        let known: Option<Object> =
            self.ivars().info.as_ref().and_then(|i| unsafe { msg_send![i, objectForKey: &*string("NSUnderlyingError")] });
        let (objects, count) = match &known {
            Some(one) => (&raw const **one, 1),
            None => (std::ptr::null(), 0),
        };
        let array: Allocated<FakeArray> = FakeArray::alloc();
        let array: Retained<FakeArray> = unsafe { msg_send![array, initWithObjects: &raw const objects, count: count as usize] };
        unsafe { Retained::cast_unchecked(array) }
    }
    #[unsafe(method_id(errorWithDomain:code:userInfo:))]
    fn make(domain: &AnyObject, code: isize, info: Option<&AnyObject>) -> Retained<Self> {
        Self::new(ErrorIvars { domain: domain.retain(), code, info: info.map(Message::retain) })
    }
    #[unsafe(method_id(domain))]
    fn domain(&self) -> Object { self.ivars().domain.clone() }
    #[unsafe(method(code))]
    fn code(&self) -> isize { self.ivars().code }
    #[unsafe(method_id(localizedDescription))]
    fn text(&self) -> Object {
        let key = unsafe { &*NSLocalizedDescriptionKey.0.get().read() };
        let known: Option<Object> = self.ivars().info.as_ref().and_then(|i| unsafe { msg_send![i, objectForKey: key] });
        known.unwrap_or_else(|| string(&format!("The operation couldn’t be completed. ({} error {}.)", as_str(&self.ivars().domain).unwrap(), self.ivars().code)))
    }
} }
#[repr(transparent)]
pub struct Global(std::cell::UnsafeCell<*const AnyObject>);
unsafe impl Sync for Global {}
#[unsafe(no_mangle)]
pub static NSLocalizedDescriptionKey: Global = Global(std::cell::UnsafeCell::new(std::ptr::null()));

pub struct ExceptionIvars {
    name: Object,
    reason: Option<Object>,
}
class! { FakeException, "NSException", ExceptionIvars, {
    #[unsafe(method_id(initWithName:reason:userInfo:))]
    fn init(this: Allocated<Self>, name: &AnyObject, reason: Option<&AnyObject>, _info: Option<&AnyObject>) -> Retained<Self> {
        init!(this, ExceptionIvars { name: name.retain(), reason: reason.map(Message::retain) })
    }
    #[unsafe(method_id(name))]
    fn name(&self) -> Object { self.ivars().name.clone() }
    #[unsafe(method_id(reason))]
    fn reason(&self) -> Option<Object> { self.ivars().reason.clone() }
    #[unsafe(method(raise))]
    fn raise(&self) { unsafe { objc_exception_throw(std::ptr::from_ref(self).cast_mut().cast()) } }
} }
/// Adds methods to a class: a name, its types, and a function of the receiver and the arguments.
macro_rules! methods {
    ($class:expr; $($name:literal $types:literal |$o:ident $(, $arg:ident: $type:ty)*| -> $result:ty $body:block)*) => { $({
        #[allow(unused_variables, unused_unsafe)]
        unsafe extern "C-unwind" fn method($o: Id, _: Sel $(, $arg: $type)*) -> $result { unsafe { $body } }
        let imp = std::mem::transmute::<*const (), Imp>(method as *const ());
        class_addMethod($class, sel_registerName($name.as_ptr()), imp, $types.as_ptr());
    })* };
}

unsafe fn is_kind_of(o: Id, class: Id) -> bool {
    let mut of = unsafe { object_getClass(o) };
    while !of.is_null() && of.cast_mut().cast() != class {
        of = unsafe { class_getSuperclass(of) };
    }
    !of.is_null()
}

pub fn register() {
    unsafe {
        let root = objc_allocateClassPair(null_mut(), c"NSObject".as_ptr(), 0);
        let meta = object_getClass(root.cast()).cast_mut();
        methods! { meta;
            c"alloc" c"@@:" |class| -> Id { create(class.cast()) }
            c"new" c"@@:" |class| -> Id {
                let (o, sel) = (create(class.cast()), sel_registerName(c"init".as_ptr()));
                let imp: unsafe extern "C-unwind" fn(Id, Sel) -> Id = std::mem::transmute(objc_msg_lookup(o, sel));
                imp(o, sel)
            }
            c"class" c"#@:" |class| -> Id { class }
        }
        methods! { root;
            c"init" c"@@:" |o| -> Id { o }
            c"retain" c"@@:" |o| -> Id { objc_retain(o) }
            c"release" c"v@:" |o| -> () { objc_release(o) }
            c"autorelease" c"@@:" |o| -> Id { objc_autorelease(o) }
            c"dealloc" c"v@:" |o| -> () { dealloc(o) }
            c"class" c"#@:" |o| -> Id { object_getClass(o).cast_mut().cast() }
            c"isKindOfClass:" c"C@:#" |o, class: Id| -> u8 { is_kind_of(o, class).into() }
            c"respondsToSelector:" c"C@::" |o, sel: Sel| -> u8 { class_respondsToSelector(object_getClass(o), sel) }
            c"conformsToProtocol:" c"C@:@" |o, protocol: Id| -> u8 { 1 }
            c"isEqual:" c"C@:@" |o, other: Id| -> u8 { (o == other).into() }
            c"hash" c"Q@:" |o| -> u64 { o as u64 }
            c"copy" c"@@:" |o| -> Id {
                let sel = sel_registerName(c"copyWithZone:".as_ptr());
                let imp: unsafe extern "C-unwind" fn(Id, Sel, Id) -> Id = std::mem::transmute(objc_msg_lookup(o, sel));
                imp(o, sel, null_mut())
            }
            c"description" c"@@:" |o| -> Id {
                let name = CStr::from_ptr(class_getName(object_getClass(o))).to_str().unwrap();
                Retained::autorelease_ptr(string(&format!("<{name}: {o:p}>"))).cast()
            }
        }
        objc_registerClassPair(root);
    }
    let _: [&AnyClass; 8] = [
        FakeString::class(),
        FakeNumber::class(),
        FakeArray::class(),
        FakeSet::class(),
        FakeDictionary::class(),
        FakeUrl::class(),
        FakeError::class(),
        FakeException::class(),
    ];
    // Kept for the life of the process.
    unsafe { NSLocalizedDescriptionKey.0.get().write(Retained::into_raw(string("NSLocalizedDescription"))) };
}
