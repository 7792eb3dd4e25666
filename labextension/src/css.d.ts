/** esbuild gives the text of a style sheet to the widget. */
declare module '*.css' {
  const css: string;
  export default css;
}
