// Print the JSON schemas of 100 types of zod 4: `npm install zod@4`, then `node zod_types.mjs > zod.json` in the same folder.
// The types stand in the order of zod's own page ("Defining schemas"). Left out are types that print no schema (bigint, symbol, undefined, Date, Map, Set).
import { readFileSync } from "node:fs";
import { z } from "zod";

const Person = z.object({ name: z.string(), age: z.number() });
const Keys = z.enum(["id", "name", "email"]);
const Category = z.object({ name: z.string(), get subcategories() { return z.array(Category); } });
const User = z.object({ email: z.email(), get posts() { return z.array(Post); } });
const Post = z.object({ title: z.string(), get author() { return User.optional(); } });

const types = {
  // primitives, coercion, literals
  "string": z.string(), "number": z.number(), "boolean": z.boolean(), "null": z.null(), "coerce.string": z.coerce.string(), "coerce.number": z.coerce.number(),
  "literal": z.literal("tuna"), "literal number": z.literal(12), "literal true": z.literal(true), "literals": z.literal(["red", "green", "blue"]),
  // strings
  "max": z.string().max(5), "min": z.string().min(5), "length": z.string().length(5), "regex": z.string().regex(/^[a-z]+$/),
  "startsWith": z.string().startsWith("aaa"), "endsWith": z.string().endsWith("zzz"), "includes": z.string().includes("---"),
  "uppercase": z.string().uppercase(), "lowercase": z.string().lowercase(), "trim": z.string().trim(),
  // string formats
  "email": z.email(), "html5Email": z.email({ pattern: z.regexes.html5Email }), "uuid": z.uuid(), "uuidv4": z.uuidv4(), "guid": z.guid(), "url": z.url(),
  "httpUrl": z.url({ protocol: /^https?$/, hostname: z.regexes.domain }), "emoji": z.emoji(), "base64": z.base64(), "base64url": z.base64url(),
  "nanoid": z.nanoid(), "cuid": z.cuid(), "cuid2": z.cuid2(), "ulid": z.ulid(), "e164": z.e164(), "iso.datetime": z.iso.datetime(),
  "iso.datetime offset": z.iso.datetime({ offset: true }), "iso.datetime local": z.iso.datetime({ local: true }), "iso.date": z.iso.date(),
  "iso.time": z.iso.time(), "iso.duration": z.iso.duration(), "ipv4": z.ipv4(), "ipv6": z.ipv6(), "cidrv4": z.cidrv4(), "cidrv6": z.cidrv6(), "mac": z.mac(),
  "creditCard": z.creditCard(), "jwt": z.jwt(), "hash": z.hash("sha256"), "stringFormat": z.stringFormat("cool-id", /^cool-[a-z0-9]{95}$/),
  // template literals, numbers, integers, stringbool
  "templateLiteral": z.templateLiteral(["hello, ", z.string(), "!"]), "templateLiteral units": z.templateLiteral([z.number(), z.enum(["px", "em", "rem"])]),
  "gt": z.number().gt(5), "lte": z.number().lte(5), "positive": z.number().positive(), "nonnegative": z.number().nonnegative(),
  "multipleOf": z.number().multipleOf(5), "int": z.int(), "int32": z.int32(), "float32": z.float32(), "float64": z.float64(), "uint32": z.uint32(),
  // enums to never
  "enum": z.enum(["Salmon", "Tuna", "Trout"]), "enum of numbers": z.enum({ One: 1, Two: 2 }), "exclude": Keys.exclude(["id"]), "stringbool": z.stringbool(),
  "optional": z.object({ a: z.optional(z.literal("yoda")) }), "nullable": z.nullable(z.string()), "nullish": z.object({ a: z.nullish(z.number()) }),
  "any": z.any(), "unknown": z.object({ a: z.unknown() }), "never": z.object({ a: z.never().optional() }),
  // objects
  "object": Person, "strictObject": z.strictObject({ name: z.string() }), "looseObject": z.looseObject({ name: z.string() }),
  "catchall": z.object({ name: z.string() }).catchall(z.string()), "keyof": Person.keyof(), "extend": Person.extend({ breed: z.string() }),
  "pick": Person.pick({ name: true }), "omit": Person.omit({ age: true }), "partial": Person.partial(), "required": Person.partial().required(), "recursive": Category, "recursive, mutually": User,
  // arrays, tuples, unions
  "array": z.array(z.string()), "array, lengths": z.array(z.string()).min(1).max(5), "tuple": z.tuple([z.string(), z.number(), z.boolean()]),
  "tuple, rest": z.tuple([z.string()], z.number()), "union": z.union([z.string(), z.number()]), "xor": z.xor([z.string(), z.number()]),
  "discriminatedUnion": z.discriminatedUnion("status", [z.object({ status: z.literal("success"), data: z.string() }), z.object({ status: z.literal("failed"), error: z.string() })]),
  "intersection": z.intersection(z.object({ name: z.string() }), z.object({ role: z.string() })),
  // records
  "record": z.record(z.string(), z.string()), "record of keys": z.record(Keys, z.string()), "record of numbers": z.record(z.number(), z.string()),
  "partialRecord": z.partialRecord(Keys, z.string()),
  // files, refinements, pipes, defaults, branded, JSON
  "file": z.object({ a: z.file().optional() }), "refine": z.string().refine((value) => value.length < 255), "default": z.object({ a: z.string().default("tuna") }),
  "readonly": z.object({ name: z.string() }).readonly(),
};
const names = Object.keys(types);
if (names.length !== 100) throw new Error(`${names.length} types`);
const { version } = JSON.parse(readFileSync("node_modules/zod/package.json", "utf8"));
console.log(`{\n"version": "zod ${version}"`);
for (const name of names) console.log("," + JSON.stringify(name) + ": " + JSON.stringify(z.toJSONSchema(types[name])));
console.log("}");
